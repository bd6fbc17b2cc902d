"""What tensors take at the worst moment of some work, to hold a backend's memory estimate against."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary


def peak_memory(run: Callable[[], object], *holders: Any) -> int:
    """Bytes that tensors have at the worst moment of `run`, in this thread; not what the process takes.

    torch's own MemTracker takes one pass of a module only, and a step has several micro-batches.

    Args:
        holders: modules, optimizers and tensors that are there before, and count.
    """
    meter = _Meter()
    for each in holders:
        if isinstance(each, torch.nn.Module):
            meter.see([*each.parameters(), *each.buffers(), *(parameter.grad for parameter in each.parameters())])
        elif isinstance(each, torch.optim.Optimizer):
            meter.see(list(each.state.values()))
        else:
            meter.see(each)
    with meter, _resizes_seen(meter):
        run()
    return meter.peak


class _Meter(TorchDispatchMode):
    """Counts storages from where an operation gives them until nobody has them."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes = WeakIdKeyDictionary()
        self._now = self.peak = 0

    def see(self, values: Any) -> None:
        for tensor in tree_iter(values):
            if isinstance(tensor, torch.Tensor):
                for storage in _storages(tensor):
                    self.resized(storage)

    def resized(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._sizes:
            size = [0]
            self._sizes[storage] = size
            weakref.finalize(storage, self._freed, size)
        size = self._sizes[storage]
        self._now += storage.nbytes() - size[0]
        size[0] = storage.nbytes()
        self.peak = max(self.peak, self._now)

    def _freed(self, size: list[int]) -> None:
        self._now -= size[0]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.see(result)
        return result


def _storages(tensor: Any) -> Iterator[torch.UntypedStorage]:
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _storages(getattr(tensor, name))
    elif isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
        yield tensor.untyped_storage()


@contextmanager
def _resizes_seen(meter: _Meter) -> Iterator[None]:
    """FSDP frees a gathered parameter by resizing its storage, which is no operation on tensors."""
    real = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = real(storage, size)
        meter.resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = real  # type: ignore[method-assign]
