"""Checkpoints of engines whose tensors torch.distributed.checkpoint can write: plain ones and DTensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from manymesh.parts import checkpoint_directory
from manymesh.parts.checkpoint_directory import Contents
from manymesh.parts.torch_checkpoint import read_tensors, write_tensors


def persistent(model: Any) -> dict[str, torch.Tensor]:
    """What a checkpoint keeps of a model: parameters, tied ones once, and persistent buffers. Not copied."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    return {name: each for name, each in model.state_dict(keep_vars=True).items() if name not in tied}


class TorchCheckpointer:
    """Reads and writes checkpoints of one model and its optimizer. All ranks of the world take part.

    Args:
        engine: its name in the manifest; engines don't read each other's checkpoints.
        device: whose random generators are saved too.
    """

    def __init__(self, engine: str, device: torch.device) -> None:
        self._engine, self._device = engine, device

    def save(self, path: str, model: Any, optimizer: Any | None, step: int) -> None:
        """Replace an older checkpoint at `path` once the new one is whole.

        Raises:
            Refused: on all ranks, where any cannot write. What was at `path` is untouched.
        """
        group = dist.group.WORLD
        tensors = _tensors(model, optimizer) | checkpoint_directory.rng_tensors(self._device, dist.get_rank())
        checkpoint_directory.save(
            path, self._contents(model, optimizer, step), lambda directory: write_tensors(directory, tensors), group
        )

    def load(self, path: str, model: Any, optimizer: Any | None) -> int:
        """Model, optimizer, schedule and, at the world size it was saved with, random generators; gives the step.

        Raises:
            Refused: on all ranks and with nothing changed, where there is no checkpoint, it is damaged, or it is of
                another model.
        """
        have = checkpoint_directory.check(path, self._contents(model, optimizer, 0), dist.group.WORLD)
        rank = dist.get_rank()
        rng = {}
        if have.world_size == dist.get_world_size():
            rng = checkpoint_directory.rng_tensors(self._device, rank)
        read_tensors(path, _tensors(model, optimizer) | rng)
        if rng:
            checkpoint_directory.set_rng(rng, self._device, rank)
        if optimizer is not None:
            optimizer.zero_grad()
            optimizer.schedule_step = have.schedule_step
        return have.step

    def _contents(self, model: Any, optimizer: Any | None, step: int) -> Contents:
        return Contents(
            engine=self._engine,
            step=step,
            schedule_step=optimizer.schedule_step if optimizer is not None else 0,
            model_type=str(model.config.model_type),
            world_size=dist.get_world_size(),
            parameters={name: list(tensor.shape) for name, tensor in persistent(model).items()},
            optimizer=optimizer is not None,
        )


def _tensors(model: Any, optimizer: Any | None) -> dict[str, Any]:
    """What a checkpoint holds, not copied: reading writes into them."""
    tensors = {f"model.{name}": tensor.detach() for name, tensor in persistent(model).items()}
    if optimizer is not None:
        tensors |= {f"optimizer.{name}": tensor for name, tensor in optimizer.tensors().items()}
    return tensors
