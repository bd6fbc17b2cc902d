"""config.json is read as transformers reads it; what would be computed wrongly is refused by its key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from transformers import AutoConfig, LlamaConfig, Qwen3MoeConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from core.errors import Refused
from core.manifest import ModelFacts
from manymesh_megatron.families import DEFAULTS, LLAMA3_ROPE, read_architecture

LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, **LLAMA3_ROPE}


def read(family: str, **config: Any) -> Any:
    return read_architecture(ModelFacts("/models/any", family, config))


@pytest.mark.parametrize("family", DEFAULTS)
def test_what_config_json_leaves_out_is_what_transformers_assumes(family: str) -> None:
    theirs = AutoConfig.for_model(family)
    have = {key: getattr(theirs, key) for key in DEFAULTS[family]}
    assert have | {"mlp_only_layers": ()} == {**DEFAULTS[family], "mlp_only_layers": ()}
    model_facts = read(family)
    assert model_facts.num_key_value_heads == theirs.num_key_value_heads
    assert model_facts.head_dim == (
        getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    )
    assert model_facts.num_experts == (getattr(theirs, "num_experts", None) or 0)


def test_keys_of_transformers_4_and_of_5_say_the_same() -> None:
    assert read("qwen3_moe", num_experts=16) == read("qwen3_moe", num_local_experts=16)
    old = {"rope_theta": 500000.0, "rope_scaling": {**LLAMA3, "type": "llama3"}}
    assert read("llama", **old) == read("llama", rope_parameters=LLAMA3)
    assert read("qwen2", num_attention_heads=8, num_key_value_heads=None).num_key_value_heads == 8


def test_layers_with_experts_are_those_of_transformers() -> None:
    model_facts = read("qwen3_moe", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert model_facts.moe_layers == (0, 1, 0, 0, 0, 1)
    dense = read("qwen3_moe", num_hidden_layers=2, mlp_only_layers=[0, 1])
    assert (dense.moe_layers, dense.num_experts) == ((), 0)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_experts_are_weighted_as_transformers_does(norm_topk_prob: bool) -> None:
    shape: dict[str, Any] = {
        "hidden_size": 8,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": norm_topk_prob,
    }
    router = Qwen3MoeTopKRouter(Qwen3MoeConfig(**shape))
    torch.nn.init.normal_(router.weight)
    logits, scores, experts = router(torch.randn(32, 8))
    pre_softmax = read("qwen3_moe", **shape).pre_softmax
    probabilities, _ = topk_routing_with_score_function(logits, 3, use_pre_softmax=pre_softmax)
    torch.testing.assert_close(probabilities, torch.zeros_like(logits).scatter(1, experts, scores))


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_positions_are_those_of_transformers(factor: float) -> None:
    config = LlamaConfig(head_dim=128, max_position_embeddings=131072, rope_parameters=LLAMA3 | {"factor": factor})
    rope = {"rotary_base": 500000.0, "rope_scaling": True, "rope_scaling_factor": factor}
    ours = RotaryEmbedding(128, 1.0, use_cpu_initialization=True, **rope)
    assert torch.equal(ours.inv_freq, LlamaRotaryEmbedding(config).inv_freq)


@pytest.mark.parametrize(
    ("family", "config", "have"),
    [
        ("gpt2", {}, "model_type='gpt2'"),
        ("llama", {"attention_bias": True}, "attention_bias=True"),
        ("qwen3", {"attention_bias": True}, "attention_bias=True"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("qwen3", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=['sliding_attention']"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config="),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear'"),
        ("qwen3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn'"),
        ("llama", {"rope_parameters": LLAMA3 | {"low_freq_factor": 2.0}}, "low_freq_factor=2.0"),
        ("llama", {"rope_parameters": LLAMA3 | {"high_freq_factor": 8.0}}, "high_freq_factor=8.0"),
        ("llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 4096}}, "embeddings=4096"),
        ("llama", {"rope_parameters": LLAMA3, "original_max_position_embeddings": 4096}, "embeddings=4096"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("qwen3_moe", {"norm_topk_prob": True, "num_experts_per_tok": 1}, "norm_topk_prob=True"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ("llama", {"architectures": ["LlamaForTokenClassification"]}, "num_labels=2"),
        (
            "llama",
            {
                "architectures": ["LlamaForTokenClassification"],
                "id2label": {"0": "x"},
                "token_classification_bias": False,
            },
            "token_classification_bias=False",
        ),
        ("llama", {"num_attention_heads": None}, "KeyError"),
    ],
)
def test_a_model_that_would_be_computed_wrongly_is_refused(family: str, config: Mapping[str, Any], have: str) -> None:
    with pytest.raises(Refused) as raised:
        read(family, **config)
    assert have in str(raised.value.have)
    assert raised.value.where == "/models/any/config.json"


def test_keys_that_a_family_does_not_have_are_ignored_as_transformers_does() -> None:
    assert read("qwen2", attention_bias=True, mlp_bias=True) == read("qwen2")
    assert read("qwen3", sliding_window=4096, max_window_layers=28) == read("qwen3")
