"""Options of the Megatron engine. Light: listing and planning import this, so no torch and no megatron."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, Literal, Self

import attrs

from core.config import EngineConfig, sampling_dtype
from core.errors import ConfigError

LayerSpec = Literal["auto", "local", "transformer_engine"]
ORDER_AXES = ("tp", "cp", "ep", "dp", "pp")

# Fields of megatron's TransformerConfig that are not the user's to override, and what decides them.
_OWNERS: Mapping[str, str] = {
    "tensor_model_parallel_size": "the option tensor_parallel",
    "pipeline_model_parallel_size": "the option pipeline_parallel",
    "virtual_pipeline_model_parallel_size": "the option virtual_pipeline",
    "context_parallel_size": "the option context_parallel",
    "expert_model_parallel_size": "the option expert_parallel",
    "expert_tensor_parallel_size": "the option expert_tensor_parallel",
    "sequence_parallel": "the option sequence_parallel",
    "num_layers_in_first_pipeline_stage": "the option first_stage_layers",
    "num_layers_in_last_pipeline_stage": "the option last_stage_layers",
    "overlap_p2p_comm": "the option overlap_p2p",
    "batch_p2p_comm": "the option overlap_p2p",
    "recompute_granularity": "the option recompute",
    "recompute_method": "the option recompute",
    "recompute_num_layers": "the option recompute_layers",
    "moe_token_dispatcher_type": "the option moe_dispatcher",
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "bf16", "fp16"), "the option dtype"),
    **dict.fromkeys(("calculate_per_token_loss", "variable_seq_lengths", "finalize_model_grads_func"), "the engine"),
    **dict.fromkeys(
        (
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
            "pipeline_model_parallel_layout",
        ),
        "the options first_stage_layers and last_stage_layers",
    ),
    **dict.fromkeys(
        (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            "normalization",
            "layernorm_epsilon",
            "qk_layernorm",
            "add_bias_linear",
            "add_qkv_bias",
            "gated_linear_unit",
            "activation_func",
            "num_moe_experts",
            "moe_ffn_hidden_size",
            "moe_layer_freq",
            "moe_router_topk",
            "moe_router_pre_softmax",
        ),
        "the model's config.json",
    ),
}


def _at_least_one(_: object, attribute: attrs.Attribute[Any], value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"{attribute.name} is at least 1", have=value, want="1 or more", where=attribute.name)


def _axis_order(_: object, attribute: attrs.Attribute[Any], value: str) -> None:
    axes = value.split("-")
    want = f"some of {', '.join(ORDER_AXES)} joined by '-', innermost first, each once"
    if unknown := [axis for axis in axes if axis not in ORDER_AXES]:
        raise ConfigError(f"order has no axis {unknown[0]!r}", have=repr(value), want=want, where="order")
    if len(set(axes)) < len(axes):
        raise ConfigError("order names an axis twice", have=repr(value), want=want, where="order")


def _two_or_more(_: object, attribute: attrs.Attribute[Any], value: int | None) -> None:
    if value is not None and value < 2:
        raise ConfigError(
            f"{attribute.name} counts the stages of each rank, from 2 on",
            have=value,
            want="2 or more, or nothing",
            where=attribute.name,
            mend=f"leave out {attribute.name} for one stage a rank",
        )


def _overrides(_: object, attribute: attrs.Attribute[Any], value: Mapping[str, Any]) -> None:
    for name in value:
        if owner := _OWNERS.get(name):
            where = f"{attribute.name}.{name}"
            raise ConfigError(
                f"{name} is decided by {owner}", have=f"{name}={value[name]!r}", where=where, mend=f"leave out {where}"
            )


def _size(default: Any = 1) -> Any:
    return attrs.field(default=default, validator=_at_least_one)


@attrs.frozen
class MegatronConfig(EngineConfig):
    """EngineConfig, the sizes of the meshes, and what megatron-core can vary.

    Raises:
        ConfigError: a size below 1, an `order` with an unknown or doubled axis, `overlap_param_gather` without what it
            needs, or an override in `transformer` of what another option decides.
    """

    tensor_parallel: int = _size()  # ranks that share each layer's matrices
    pipeline_parallel: int = _size()  # ranks in a row, each of which holds a part of the layers
    virtual_pipeline: int | None = attrs.field(default=None, validator=_two_or_more)  # stages a rank; None: one
    first_stage_layers: int | None = _size(None)  # of the first pipeline rank; None: as the ranks between
    last_stage_layers: int | None = _size(None)  # of the last pipeline rank; None: as the ranks between
    context_parallel: int = _size()  # ranks that share each row's tokens
    expert_parallel: int = _size()  # ranks that share the experts of a layer
    expert_tensor_parallel: int | None = _size(None)  # None: as tensor_parallel, which is megatron's default
    order: str = attrs.field(default="tp-cp-ep-dp-pp", validator=_axis_order)  # of ranks on axes, innermost first
    sequence_parallel: bool | None = None  # norms work on 1/tensor_parallel of the tokens; None: so on GPUs
    distributed_optimizer: bool = True  # each data-parallel rank holds its share of the optimizer's state
    overlap_grad_reduce: bool = False  # reduce a bucket of gradients while backward goes on
    overlap_param_gather: bool = False  # gather a bucket of parameters while forward goes on
    bucket_size: int | None = _size(None)  # parameters a bucket; None: megatron's choice
    recompute: Literal["none", "selective", "full"] = "none"  # of activations in backward
    recompute_layers: int = _size()  # layers that "full" recomputes as one block
    moe_dispatcher: Literal["alltoall", "allgather", "flex"] = "alltoall"  # of tokens to experts; flex: by DeepEP
    packing: bool | None = None  # run rows without padding; None: where TransformerEngine's layers can
    layer_spec: LayerSpec = "auto"  # whose layers; "auto": the machine's best
    offload_parameters: bool = False  # parameters on CPU outside of the modes, gradients nowhere outside of train_mode
    offload_optimizer: bool = False  # optimizer state on CPU outside of train_mode
    async_checkpoint: bool = False  # write checkpoints while training goes on
    overlap_p2p: bool | None = None  # of stages' sends with compute; None: on with virtual stages
    vocab_multiple: int = _size()  # the vocabulary is padded to a multiple of vocab_multiple * tensor_parallel
    transformer: Mapping[str, Any] = attrs.field(factory=dict, validator=_overrides)  # megatron's TransformerConfig

    def __attrs_post_init__(self) -> None:
        if self.overlap_param_gather and not (self.distributed_optimizer and self.overlap_grad_reduce):
            raise ConfigError(
                "overlap_param_gather needs distributed_optimizer and overlap_grad_reduce",
                have=f"distributed_optimizer={self.distributed_optimizer}, "
                f"overlap_grad_reduce={self.overlap_grad_reduce}",
                want="both true",
                where="overlap_param_gather",
                mend="set both, or overlap_param_gather=false",
            )

    def on(self, device: str) -> Self:
        """As EngineConfig.on. The dtype "auto" is float32 on CPU and bfloat16 elsewhere, where the optimizer steps in
        float32 copies. The layers "auto" are TransformerEngine's on CUDA where it is installed in this process."""
        have_engine = device == "cuda" and importlib.util.find_spec("transformer_engine") is not None
        auto_spec: LayerSpec = "transformer_engine" if have_engine else "local"
        auto_parallel = device != "cpu" and self.tensor_parallel > 1
        return attrs.evolve(
            self,
            dtype=sampling_dtype(device) if self.dtype == "auto" else self.dtype,
            layer_spec=auto_spec if self.layer_spec == "auto" else self.layer_spec,
            sequence_parallel=auto_parallel if self.sequence_parallel is None else self.sequence_parallel,
        )

    @property
    def expert_tensor_size(self) -> int:
        """expert_tensor_parallel, or what stands for None."""
        return self.tensor_parallel if self.expert_tensor_parallel is None else self.expert_tensor_parallel

    @property
    def virtual_stages(self) -> int:
        """Stages that each pipeline rank holds; 1 where they are not interleaved."""
        return self.virtual_pipeline or 1

    @property
    def packed(self) -> bool:
        """Whether rows are run without padding between them."""
        if self.packing is None:
            can_pack = self.context_parallel == 1 and self.moe_dispatcher != "allgather"
            return self.layer_spec == "transformer_engine" and can_pack
        return self.packing

    def stage_layers(self, num_layers: int) -> list[int] | None:
        """How many layers each pipeline rank has; None where they cannot be dealt so."""
        ends = [each for each in (self.first_stage_layers, self.last_stage_layers) if each is not None]
        between, rest = self.pipeline_parallel - len(ends), num_layers - sum(ends)
        each = rest // between if between > 0 else 0
        if between < 0 or each * between != rest or (between > 0 and each < 1):
            return None
        first = [self.first_stage_layers] if self.first_stage_layers is not None else []
        last = [self.last_stage_layers] if self.last_stage_layers is not None else []
        stages = [*first, *[each] * between, *last]
        return None if any(layers % self.virtual_stages for layers in stages) else stages
