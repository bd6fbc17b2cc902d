"""Moving a model's and an optimizer's tensors between the device and the CPU, in place.

Parameters and gradients of megatron's DDP are views into flat buffers, so the buffers' memory is what is moved: their
storage is freed and filled again, and every view stays what it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from manymesh_megatron.optimizer import ScheduledOptimizer

# torch rounds each piece of pinned memory up to a power of two: a buffer of 9 GiB would take 16.
CHUNK = 2**30


class Parked:
    """Tensors whose memory is away: the storages are empty, the bytes are on CPU."""

    def __init__(self, tensors: Iterable[torch.Tensor], *, keep: bool = True) -> None:
        """Take the tensors' memory away.

        Args:
            keep: keep their values; else they come back as zeros (gradients between steps).
        """
        self._away: list[tuple[torch.UntypedStorage, int, list[torch.Tensor] | None]] = []
        addresses: set[int] = set()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() in addresses or not storage.nbytes():
                continue
            addresses.add(storage.data_ptr())
            self._away.append((storage, storage.nbytes(), _to_cpu(storage) if keep else None))
        for storage, _, _ in self._away:
            storage.resize_(0)

    def restore(self) -> None:
        for storage, size, copies in self._away:
            storage.resize_(size)
            if copies is None:
                _bytes(storage).zero_()
                continue
            for (start, end), copy in zip(chunks(size, CHUNK), copies, strict=True):
                _bytes(storage)[start:end].copy_(copy, non_blocking=True)
        self._away = []


def chunks(num_bytes: int, size: int) -> list[tuple[int, int]]:
    """Where pieces of at most `size` bytes begin and end, of a buffer."""
    return [(start, min(start + size, num_bytes)) for start in range(0, num_bytes, size)]


def _to_cpu(storage: torch.UntypedStorage) -> list[torch.Tensor]:
    pinned, source = storage.device.type != "cpu", _bytes(storage)
    return [
        host_memory(end - start, pinned=pinned).copy_(source[start:end])
        for start, end in chunks(storage.nbytes(), CHUNK)
    ]


def host_memory(num_bytes: int, *, pinned: bool) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def parameter_tensors(chunks: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    return [each.data for chunk in chunks for each in chunk.parameters()]


def gradient_tensors(chunks: Sequence[Any]) -> list[torch.Tensor]:
    """The flat buffers of megatron's DDP."""
    return [buffer.grad_data for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def state_tensors(optimizer: ScheduledOptimizer) -> list[torch.Tensor]:
    """Moments and fp32 parameters. The latter are the model's own memory where the model is fp32: that is not moved."""
    tensors: list[torch.Tensor] = []
    for part in optimizer.parts:
        tensors += [each for state in part.optimizer.state.values() for each in state.values() if _movable(each)]
        for name in ("shard_fp32_from_float16_groups", "fp32_from_float16_groups"):
            tensors += [each.data for group in getattr(part, name, ()) for each in group if each is not None]
    return tensors


def _movable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0
