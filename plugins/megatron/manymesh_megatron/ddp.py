"""The model in megatron's DistributedDataParallel, which holds gradients, and what megatron's schedules call of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from manymesh_megatron.config import MegatronConfig


def in_ddp(
    models: Sequence[GPTModel], transformer: TransformerConfig, config: MegatronConfig
) -> list[DistributedDataParallel]:
    """A rank's stages, in virtual order, wrapped; `transformer` is told of it."""
    chunks = [_wrap(model, transformer, config, first=number == 0) for number, model in enumerate(models)]
    transformer.finalize_model_grads_func = _finalize
    if config.overlap_grad_reduce:
        no_syncs: list[Any] = [chunk.no_sync for chunk in chunks]
        transformer.no_sync_func = no_syncs if len(no_syncs) > 1 else no_syncs[0]
    return chunks


def _wrap(
    model: GPTModel, transformer: TransformerConfig, config: MegatronConfig, *, first: bool
) -> DistributedDataParallel:
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=config.distributed_optimizer,
        overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=config.overlap_param_gather,
        bucket_size=config.bucket_size,
        check_for_nan_in_grad=False,  # it would end the process; the optimizer skips such a step
    )
    # Only the first virtual stage's communication is on the way of what follows.
    return DistributedDataParallel(transformer, options, model, disable_bucketing=not first)


def _finalize(models: list[Any], num_tokens: Any = None, **options: Any) -> None:
    finalize_model_grads(models, None, **options)  # our losses are divided already
