"""A tensor in the form that crosses between processes: a numpy array, which Ray keeps out of the pickle stream."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import attrs

from core.errors import Refused

if TYPE_CHECKING:
    import numpy as np
    import torch


@attrs.frozen(slots=True)
class WireTensor:
    array: np.ndarray[Any, Any]  # the raw bytes of what numpy lacks
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(self.array.nbytes)

    def __reduce__(self) -> tuple[Any, ...]:
        return WireTensor, (self.array, self.dtype, self.shape)  # a third of the time of the slots' states


def num_bytes(value: Any) -> int:
    """Bytes of the arrays and pickled objects in a value on the wire, or of a batch's tensors; the rest counts 0."""
    if type(value) in (tuple, list):
        return sum(map(num_bytes, value))
    if type(value) is dict:
        return sum(map(num_bytes, value.values()))
    return int(getattr(value, "nbytes", 0))


_NUMPY_LACKS = frozenset({"bfloat16", "complex32"})


def to_wire(tensor: torch.Tensor | WireTensor) -> WireTensor:
    """The tensor as an array of its own elements. Raises Refused for layouts that have no array."""
    import torch

    if isinstance(tensor, WireTensor):
        return tensor
    if tensor.layout != torch.strided or tensor.is_meta:
        raise Refused(
            "only dense and jagged tensors can be sent", have=f"{tensor.layout} on {tensor.device}", mend="to_dense()"
        )
    tensor = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    if dtype in _NUMPY_LACKS or dtype.startswith("float8"):
        return WireTensor(tensor.reshape(-1).view(torch.uint8).numpy(), dtype, shape)
    return WireTensor(tensor.numpy(), dtype, shape)


def shared(wire: WireTensor, copy: Callable[[Any], Any] = lambda array: array) -> torch.Tensor:
    """The tensor on the array's memory, which may be read-only memory that others read too."""
    import torch

    dtype = getattr(torch, wire.dtype)
    tensor = torch.from_numpy(copy(wire.array))
    return tensor if tensor.dtype == dtype else tensor.view(dtype).reshape(wire.shape)


def copied(wire: WireTensor) -> torch.Tensor:
    """The tensor in memory of its own."""
    return shared(wire, own)


def own(array: Any) -> Any:
    """A private copy of an array."""
    from core._rows.memory_pool import PAGES

    return PAGES.copy(array)


def equal(a: Any, b: Any) -> bool:
    """Equal by `==`, or where that gives no answer (arrays, nan, objects without it) by how they pickle."""
    with suppress(Exception):
        if a is b or (a == b) is True:
            return True
    with suppress(Exception):
        return pickle.dumps(a) == pickle.dumps(b)
    return False
