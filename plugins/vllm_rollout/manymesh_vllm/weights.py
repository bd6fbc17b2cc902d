"""Loading a stream of named tensors into a live vLLM model, by vLLM's layerwise reload.

vLLM keeps weights in a form of its own (q, k and v fused, experts fused, on CPU packed for the kernels), so that a
tensor cannot be copied to its place by itself. Its layerwise reload takes tensors as they are saved, holds them until
one of its own layers is whole, makes the layer anew and copies it over the live one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from core.errors import ManymeshError
from manymesh.parts.weight_names import some

_OURS = "_manymesh_copy"  # marks a tensor that is no sender's


class Reload:
    """One pass of all weights into a live model, in buckets of any order and size. Names and shapes are checked before.

    Args:
        worker: vLLM's worker in this process.
    """

    def __init__(self, worker: Any) -> None:
        self._worker, self._model = worker, worker.model_runner.get_model()
        # Before the reload, which takes tied parameters apart.
        self._unfilled: set[str] | None = {name for name, _ in self._model.named_parameters()}
        with self._in_vllm():
            initialize_layerwise_reload(self._model)
        self._on_cpu = worker.device.type == "cpu"
        if self._on_cpu:
            self._forget_experts_kernels()

    def _in_vllm(self) -> Any:
        return set_current_vllm_config(self._worker.vllm_config)

    def load(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Hand the bucket's tensors to their layers; they may be reused after return."""
        with self._in_vllm(), torch.no_grad():
            filled = self._model.load_weights(iter(bucket))
            self._keep_what_waits()
        if self._unfilled is not None:
            # Quantised models have parameters that no checkpoint fills, and some models don't tell: vLLM's own rule.
            quantised = self._worker.model_config.quantization is not None
            self._unfilled = None if filled is None or quantised else self._unfilled - set(filled)

    def _keep_what_waits(self) -> None:
        """Copy the tensors that vLLM holds for layers that are not whole: it holds the sender's own memory.

        Not whole are fused layers of which a part is in another bucket, weights whose bias is, and vocabularies that
        vLLM pads, until the end.
        """
        for layer in self._model.modules():
            for _, arguments in get_layerwise_info(layer).loaded_weights:
                tensors = arguments.arguments
                for key, value in tensors.items():
                    if isinstance(value, torch.Tensor) and key != "param" and not hasattr(value, _OURS):
                        tensors[key] = value.clone()
                        setattr(tensors[key], _OURS, True)

    def finish(self) -> None:
        """Put the new weights to use, once all have come. Raises ManymeshError where vLLM left some as they were."""
        if self._unfilled:
            raise ManymeshError(
                "vLLM took all weights and left parameters of the model without any",
                have=some(sorted(self._unfilled)),
                where=type(self._model).__name__,
                mend="use another rollout for this model",
            )
        infos = [(layer, get_layerwise_info(layer)) for layer in self._model.modules()]
        tied = [layer for layer, info in infos if info.can_load() and info.load_numel_total and not info.load_numel]
        with self._in_vllm():
            finalize_layerwise_reload(self._model, self._worker.model_config)
        if self._on_cpu:
            self._pack_again(tied)

    def _forget_experts_kernels(self) -> None:
        """On CPU vLLM packs experts when it builds their kernel, and where it has one leaves them unpacked."""
        for layer in self._model.modules():
            if getattr(getattr(layer, "quant_method", None), "moe_kernel", None) is not None:
                layer.quant_method.moe_kernel = None

    def _pack_again(self, tied: Sequence[torch.nn.Module]) -> None:
        """On CPU a layer that shares its weights with another has a packed copy of its own, which no reload renews."""
        for layer in tied:
            if (method := getattr(layer, "quant_method", None)) is not None:
                method.process_weights_after_loading(layer)

    def abort(self) -> None:
        """Give every layer that is not whole its old tensors back. Layers that were whole have the new ones."""
        for layer in self._model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = info.load_numel_total = 0
        with self._in_vllm():
            finalize_layerwise_reload(self._model, self._worker.model_config)
