"""From a Hugging Face config to this rank's chunks of a megatron-core GPTModel, without weights yet."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional as F
from transformers import AutoConfig

from core.errors import ConfigError, Refused, did_you_mean
from core.manifest import ModelFacts
from manymesh_megatron.config import MegatronConfig
from manymesh_megatron.families import Architecture, read_architecture
from manymesh_megatron.modules import ValueHead, read_without_gradient
from manymesh_megatron.runtime import Runtime


def transformer_config(config: MegatronConfig, model: ModelFacts, runtime: Runtime) -> TransformerConfig:
    """megatron's description of the model and of how it is run.

    Raises:
        ConfigError: `transformer` overrides a field that TransformerConfig doesn't have.
        Refused: megatron refuses the combination.
    """
    hf = _hf_config(model)
    architecture = read_architecture(model)
    dtype = getattr(torch, config.dtype)
    fields: dict[str, Any] = {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "ffn_hidden_size": hf.intermediate_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": architecture.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.rms_norm_eps,
        "qk_layernorm": hf.model_type in ("qwen3", "qwen3_moe"),
        "add_qkv_bias": hf.model_type == "qwen2",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "tensor_model_parallel_size": config.tensor_parallel,
        "pipeline_model_parallel_size": config.pipeline_parallel,
        "virtual_pipeline_model_parallel_size": config.virtual_pipeline,
        "context_parallel_size": config.context_parallel,
        "expert_model_parallel_size": config.expert_parallel,
        "expert_tensor_parallel_size": config.expert_tensor_size,
        "num_layers_in_first_pipeline_stage": config.first_stage_layers,
        "num_layers_in_last_pipeline_stage": config.last_stage_layers,
        "sequence_parallel": bool(config.sequence_parallel),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # Micro-batches differ in shape, so stages tell each other what comes.
        "variable_seq_lengths": config.pipeline_parallel > 1,
        # The loss is a share of a sum: megatron then divides by nothing.
        "calculate_per_token_loss": True,
        "moe_token_dispatcher_type": config.moe_dispatcher,
        # Every weight is loaded after this, but megatron marks a sharded one only where it initialises it.
        "init_method": _leave,
        "output_layer_init_method": _leave,
        **_experts(hf, architecture),
        **_recompute(config),
        **_pipeline(config),
        **runtime.transformer,
    }
    known_fields = set(TransformerConfig.__dataclass_fields__)
    for name in config.transformer:
        if name not in known_fields:
            raise ConfigError(
                f"megatron's TransformerConfig has no field {name!r}",
                where=f"transformer.{name}",
                mend=did_you_mean(name, known_fields),
            )
    try:
        # What a version of megatron doesn't have is what it doesn't need.
        return TransformerConfig(
            **{**{name: value for name, value in fields.items() if name in known_fields}, **config.transformer}
        )
    except (AssertionError, ValueError, RuntimeError) as error:
        raise Refused(
            "megatron-core refuses this configuration", have=f"{type(error).__name__}: {error}", where=model.path
        ) from error


def build_chunks(
    config: MegatronConfig, transformer: TransformerConfig, model: ModelFacts, runtime: Runtime, *, value_head: bool
) -> list[GPTModel]:
    """This rank's stages, in virtual order; their parameters hold nothing yet."""
    hf = _hf_config(model)
    rope = dict(hf.rope_parameters)
    scaled = rope.get("rope_type", "default") == "llama3"
    groups = ProcessGroupCollection.use_mpu_process_groups()
    multiple = config.vocab_multiple * config.tensor_parallel
    chunks = []
    for stage in range(config.virtual_stages):
        vp_stage = stage if config.virtual_pipeline else None
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        chunk = GPTModel(
            config=transformer,
            transformer_layer_spec=runtime.block_spec(transformer, vp_stage),
            vocab_size=-(-hf.vocab_size // multiple) * multiple,
            max_sequence_length=hf.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=last,
            share_embeddings_and_output_weights=hf.tie_word_embeddings and not value_head,
            position_embedding_type="rope",
            rotary_base=rope["rope_theta"],
            rope_scaling=scaled,
            rope_scaling_factor=rope.get("factor", 8.0),
            vp_stage=vp_stage,
        )
        if value_head and last:
            chunk.output_layer = ValueHead(transformer, groups.tp)
        if chunk.pre_process and hf.pad_token_id is not None:
            read_without_gradient(chunk.embedding, hf.pad_token_id % hf.vocab_size, groups.tp)
        chunk.requires_grad_(config.trainable)
        chunks.append(chunk)
    return chunks


def start_value_head(chunks: list[GPTModel], seed: int, std: float = 0.02) -> None:
    """Random weights for a head that no checkpoint has, the same on all ranks that hold it."""
    for chunk in chunks:
        if isinstance(head := getattr(chunk, "output_layer", None), ValueHead):
            weight = torch.empty(head.weight.shape).normal_(std=std, generator=torch.Generator().manual_seed(seed))
            with torch.no_grad():
                head.weight.copy_(weight)
                head.bias.zero_()


def _hf_config(model: ModelFacts) -> Any:
    """With transformers' defaults for what config.json leaves out."""
    try:
        return AutoConfig.from_pretrained(model.path)
    except Exception as error:
        raise Refused(
            f"transformers cannot read the config of {model.path!r}",
            have=f"{type(error).__name__}: {error}",
            where=model.path,
            mend="give a directory written by save_pretrained: config.json and *.safetensors",
        ) from error


def _leave(weight: torch.Tensor) -> None:
    pass


def _experts(hf: Any, architecture: Architecture) -> dict[str, Any]:
    if not architecture.num_experts:
        return {}
    return {
        "num_moe_experts": architecture.num_experts,
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_ffn_hidden_size": architecture.moe_intermediate_size,
        "moe_layer_freq": list(architecture.moe_layers),
        "moe_router_pre_softmax": architecture.pre_softmax,
        "moe_router_load_balancing_type": "none",
    }


def _recompute(config: MegatronConfig) -> dict[str, Any]:
    if config.recompute == "none":
        return {}
    full = {"recompute_method": "uniform", "recompute_num_layers": config.recompute_layers}
    return {"recompute_granularity": config.recompute, **(full if config.recompute == "full" else {})}


def _pipeline(config: MegatronConfig) -> dict[str, Any]:
    # With virtual stages megatron's default, batched sends, gives wrong gradients.
    overlap = config.virtual_stages > 1 if config.overlap_p2p is None else config.overlap_p2p
    return {"overlap_p2p_comm": overlap, "batch_p2p_comm": not overlap}
