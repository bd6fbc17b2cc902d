"""The model families that the engine computes exactly as transformers does, read off config.json. Light: no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from core.errors import Refused
from core.manifest import ModelFacts

_MEND = "train this model with another engine"

# What transformers' config classes say where config.json leaves a key out (a test compares).
_COMMON: Mapping[str, Any] = {
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "attention_bias": False,
}
_MOE: Mapping[str, Any] = {
    "num_hidden_layers": 24,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": (),
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        **{key: value for key, value in _COMMON.items() if key not in ("num_key_value_heads", "use_sliding_window")},
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "mlp_bias": False,
    },
    "qwen2": {key: value for key, value in _COMMON.items() if key != "attention_bias"},
    "qwen3": {**_COMMON, "head_dim": 128},
    "qwen3_moe": {**_COMMON, **_MOE},
}

# The keys with one right value here, and why another would be computed wrongly. Families without the key ignore it.
_FIXED: Mapping[str, tuple[Any, str]] = {
    "hidden_act": ("silu", "the MLP is SwiGLU"),
    "attention_bias": (False, "megatron-core cannot give the attention's output projection a bias of its own"),
    "mlp_bias": (False, "the MLP has no biases"),
    "use_sliding_window": (False, "attention is causal over the whole row"),
    "attention_dropout": (0.0, "attention has no dropout"),
}
# The constants that megatron-core's RotaryEmbedding has for Llama 3; only `factor` is free.
LLAMA3_ROPE: Mapping[str, float] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@attrs.frozen
class Architecture:
    """What decides how a model can be cut, under the names of config.json where it has them.

    Attributes:
        num_experts, moe_intermediate_size: 0 for a dense model.
        moe_layers: for each layer 1 where it has experts, else 0: megatron's `moe_layer_freq`. Empty: a dense model.
        pre_softmax: megatron's `moe_router_pre_softmax`. Softmax over all experts, then top-k without norming again, as
            transformers does with `norm_topk_prob` false. With it true, softmax over the chosen ones is the same.
        value_head: the directory is of a *ForTokenClassification with one label.
    """

    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    num_experts: int
    moe_intermediate_size: int
    moe_layers: tuple[int, ...]
    pre_softmax: bool
    value_head: bool


def read_architecture(model: ModelFacts) -> Architecture:
    """Of a directory that the engine can run.

    Raises:
        Refused: a family or a head that it doesn't know, or a key of config.json that it would compute wrongly.
    """
    family = model.model_type
    where = f"{model.path}/config.json"
    if family not in DEFAULTS:
        raise Refused(
            f"the Megatron engine does not know models of type {family!r}",
            have=f"model_type={family!r}",
            want=f"one of {sorted(DEFAULTS)}",
            where=where,
            mend=_MEND,
        )
    try:
        return _read(family, model.config, where)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise Refused(
            "config.json does not say how the model is built", have=f"{type(error).__name__}: {error}", where=where
        ) from error


def _read(family: str, config: Mapping[str, Any], where: str) -> Architecture:
    # null is as good as absent, where transformers derives the value.
    facts = {key: value for key, value in {**DEFAULTS[family], **config}.items() if value is not None}
    for key, (right, why) in _FIXED.items():
        if key in DEFAULTS[family] and facts.get(key, right) != right:
            raise _wrong(key, facts[key], repr(right), why, where)
    if facts.get("quantization_config"):
        raise _wrong("quantization_config", "a mapping", "none", "weights are plain tensors", where)
    if strange := sorted(set(facts.get("layer_types", ())) - {"full_attention"}):
        raise _wrong("layer_types", strange, "only 'full_attention'", "attention is causal over the whole row", where)
    _check_rope(facts, where)
    moe_layers = _moe_layers(facts)
    if moe_layers and facts["norm_topk_prob"] and facts["num_experts_per_tok"] == 1:
        why = "one expert's weight, normed, is always 1, and its router never learns"
        raise _wrong("norm_topk_prob", True, "false with num_experts_per_tok=1", why, where)
    heads = int(facts["num_attention_heads"])
    return Architecture(
        num_hidden_layers=int(facts["num_hidden_layers"]),
        num_attention_heads=heads,
        num_key_value_heads=int(facts.get("num_key_value_heads", heads)),
        head_dim=int(facts.get("head_dim", facts["hidden_size"] // heads)),
        intermediate_size=int(facts["intermediate_size"]),
        num_experts=_num_experts(facts) if moe_layers else 0,
        moe_intermediate_size=int(facts["moe_intermediate_size"]) if moe_layers else 0,
        moe_layers=moe_layers,
        pre_softmax=bool(moe_layers) and not facts["norm_topk_prob"],
        value_head=_value_head(facts, where),
    )


def _num_experts(facts: Mapping[str, Any]) -> int:
    # transformers 5 writes num_local_experts, transformers 4 wrote num_experts.
    return int(facts.get("num_local_experts", facts.get("num_experts", 0)))


def _moe_layers(facts: Mapping[str, Any]) -> tuple[int, ...]:
    """transformers' rule for Qwen3-MoE: every decoder_sparse_step-th layer, but for mlp_only_layers."""
    if not _num_experts(facts):
        return ()
    step, dense = facts["decoder_sparse_step"], set(facts.get("mlp_only_layers", ()))
    layers = tuple(int(i not in dense and (i + 1) % step == 0) for i in range(facts["num_hidden_layers"]))
    return layers if any(layers) else ()


def _check_rope(facts: Mapping[str, Any], where: str) -> None:
    # transformers 4 wrote rope_scaling, with the theta beside it, and before that "type" for "rope_type".
    rope: Mapping[str, Any] = facts.get("rope_scaling") or facts.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise _wrong("rope_type", kind, "'default' or 'llama3'", "other scalings of positions are not there", where)
    partial = rope.get("partial_rotary_factor", facts.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise _wrong("partial_rotary_factor", partial, "1.0", "positions turn the whole head", where)
    if kind == "llama3":
        fallback = {"original_max_position_embeddings": facts["max_position_embeddings"]}
        if "original_max_position_embeddings" in facts:  # beside the others it has priority in transformers
            rope = {**rope, "original_max_position_embeddings": facts["original_max_position_embeddings"]}
        for key, right in LLAMA3_ROPE.items():
            if (have := rope.get(key, fallback.get(key))) != right:
                raise _wrong(key, have, f"{right:g}", "megatron-core's rotary embedding has it built in", where)


def _value_head(facts: Mapping[str, Any], where: str) -> bool:
    names = [str(name) for name in facts.get("architectures", ())]
    if not names or any(name.endswith("ForCausalLM") for name in names):
        return False
    if not any(name.endswith("ForTokenClassification") for name in names):
        want = "a *ForCausalLM or a *ForTokenClassification with one label"
        raise _wrong("architectures", names, want, "there are no other heads", where)
    labels = len(facts["id2label"]) if "id2label" in facts else facts.get("num_labels", 2)
    if labels != 1:
        raise _wrong("num_labels", labels, "1", "a value model gives one number a token", where)
    if not facts.get("token_classification_bias", True):
        raise _wrong("token_classification_bias", False, "true", "the value head has a bias", where)
    return True


def _wrong(key: str, value: Any, want: str, why: str, where: str) -> Refused:
    return Refused(
        f"the Megatron engine would compute this model wrongly: {why}",
        have=f"{key}={value!r}",
        want=f"{key} {want}",
        where=where,
        mend=_MEND,
    )
