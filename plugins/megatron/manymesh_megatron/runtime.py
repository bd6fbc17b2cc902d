"""The one object that holds all that differs between CUDA and CPU: device, layers, fused kernels, and the shim."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

from core.device import choose_device
from core.errors import Refused
from manymesh_megatron.config import MegatronConfig
from manymesh_megatron.cpu_shim import on_cpu
from manymesh_megatron.environment import set_variables
from manymesh_megatron.modules import local_block_spec


@attrs.frozen
class Runtime:
    """How this rank runs megatron-core.

    Attributes:
        device: where parameters live while they are used.
        scope: entered around everything that calls megatron-core.
        transformer_engine: whether its layers are used; else megatron's own with ours in them.
        transformer: fields of megatron's TransformerConfig that the machine decides.
    """

    device: torch.device
    scope: Callable[[], AbstractContextManager[None]]
    transformer_engine: bool
    transformer: dict[str, Any]

    @classmethod
    def choose(cls, config: MegatronConfig, device: str | None) -> Runtime:
        """Raises Refused: no such device, or TransformerEngine's layers or DeepEP's kernels where they aren't."""
        set_variables()
        torch_device = choose_device(device)
        on_cuda = torch_device.type == "cuda"
        have = on_cuda and importlib.util.find_spec("transformer_engine") is not None
        if config.layer_spec == "transformer_engine" and not have:
            raise Refused(
                "TransformerEngine's layers need CUDA and the package transformer-engine",
                have=f"device {torch_device}, the package is {'' if have else 'not '}usable",
                mend="install transformer-engine[pytorch], or set layer_spec='auto'",
            )
        if config.moe_dispatcher == "flex" and not (on_cuda and _can_import("deep_ep")):
            raise Refused(
                "the flex dispatcher needs CUDA and the package deep_ep",
                have=f"device {torch_device}" + (", the package cannot be imported" if on_cuda else ""),
                mend="install DeepEP, or set moe_dispatcher='alltoall'",
            )
        transformer_engine = config.on(torch_device.type).layer_spec == "transformer_engine"
        return cls(
            torch_device,
            nullcontext if on_cuda else on_cpu,
            transformer_engine,
            fused(transformer_engine, on_cuda, trainable=config.trainable),
        )

    def block_spec(self, config: Any, vp_stage: int | None) -> Any:
        """megatron's spec of the layers of one (virtual) stage."""
        if not self.transformer_engine:
            return local_block_spec(config, vp_stage)
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)


def fused(transformer_engine: bool, on_cuda: bool, *, trainable: bool) -> dict[str, Any]:
    """megatron's options of fused kernels: each where it can be used, since its absence is an error at the first call.

    Products add a weight's gradient to the DDP's buffer, with apex's kernel, where there is a buffer.
    """
    return {
        "gradient_accumulation_fusion": on_cuda and trainable and _can_import("fused_weight_gradient_mlp_cuda"),
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": on_cuda,
        "apply_rope_fusion": transformer_engine,
        "moe_grouped_gemm": transformer_engine,
        "moe_permute_fusion": transformer_engine,
        # Stages free what they have sent; on CPU that takes a way into autograd which leaves the shim.
        "deallocate_pipeline_outputs": on_cuda,
    }


def _can_import(name: str) -> bool:
    """An extension that was built for another torch is found, and cannot be imported."""
    try:
        importlib.import_module(name)
    except (ImportError, OSError):
        return False
    return True
