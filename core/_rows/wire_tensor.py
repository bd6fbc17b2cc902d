"""A tensor in the form that crosses between processes: a numpy array, which Ray keeps out of the pickle stream."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import attrs

from core.errors import Refused

if TYPE_CHECKING:
    import numpy as np
    import torch


@attrs.frozen(slots=True)
class WireTensor:
    """Rows of it are cut and joined as those of the array, without torch's dispatch.

    Attributes:
        array: of the tensor's shape; of what numpy lacks, integers of the same width.
        dtype: torch's name of the tensor's dtype.
    """

    array: np.ndarray[Any, Any]
    dtype: str

    @property
    def nbytes(self) -> int:
        return int(self.array.nbytes)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, rows: slice) -> WireTensor:
        return WireTensor(self.array[rows], self.dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return WireTensor, (self.array, self.dtype)  # a third of the time of the slots' states


def cut_offsets(offsets: WireTensor, start: int, stop: int) -> WireTensor:
    """Offsets of rows start..stop-1."""
    part = offsets.array[start : stop + 1]
    return WireTensor(part - part[0] if len(part) and part[0] else part, offsets.dtype)


def joined_offsets(parts: Sequence[WireTensor]) -> WireTensor:
    """Offsets of the rows of all parts one after another."""
    import numpy as np

    shifts = accumulate((int(part.array[-1]) for part in parts), initial=0)
    offsets_of_parts = [part.array[1:] + shift for part, shift in zip(parts, shifts, strict=False)]
    return WireTensor(np.concatenate([np.zeros(1, np.int64), *offsets_of_parts]), "int64")


def concatenated(parts: Sequence[WireTensor]) -> WireTensor:
    """All parts one after another, copied."""
    import numpy as np

    from core._rows.memory_pool import MEMORY_POOL, SMALL_BYTES

    arrays, num_bytes = [part.array for part in parts], sum(part.nbytes for part in parts)
    if num_bytes < SMALL_BYTES:
        return WireTensor(np.concatenate(arrays), parts[0].dtype)
    num, first = sum(map(len, arrays)), arrays[0]
    out = MEMORY_POOL.take(num_bytes).view(first.dtype).reshape(num, *first.shape[1:])
    return WireTensor(np.concatenate(arrays, out=out), parts[0].dtype)


def num_bytes(value: Any) -> int:
    """Bytes of the arrays and pickled objects in a value on the wire, or of a batch's tensors; the rest counts 0."""
    if type(value) in (tuple, list):
        return sum(map(num_bytes, value))
    if type(value) is dict:
        return sum(map(num_bytes, value.values()))
    return int(getattr(value, "nbytes", 0))


# What numpy lacks, as integers of its width.
_NUMPY_LACKS = {"bfloat16": "int16", "complex32": "int32"}


def to_wire(tensor: torch.Tensor | WireTensor) -> WireTensor:
    """The tensor as an array of its own elements. Raises Refused for layouts that have no array."""
    if isinstance(tensor, WireTensor):
        return tensor
    import torch

    if tensor.layout != torch.strided or tensor.is_meta:
        raise Refused(
            "only dense and jagged tensors can be sent", have=f"{tensor.layout} on {tensor.device}", mend="to_dense()"
        )
    tensor = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    dtype = str(tensor.dtype).removeprefix("torch.")
    integers = "uint8" if dtype.startswith("float8") else _NUMPY_LACKS.get(dtype)
    return WireTensor((tensor if integers is None else tensor.view(getattr(torch, integers))).numpy(), dtype)


def shared(wire: WireTensor, copy: Callable[[Any], Any] = lambda array: array) -> torch.Tensor:
    """The tensor on the array's memory, which may be read-only memory that others read too."""
    import torch

    dtype = getattr(torch, wire.dtype)
    tensor = torch.from_numpy(copy(wire.array))
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def copied(wire: WireTensor) -> torch.Tensor:
    """The tensor in memory of its own."""
    return shared(wire, own)


def own(array: Any) -> Any:
    """A private copy of an array."""
    from core._rows.memory_pool import MEMORY_POOL

    return MEMORY_POOL.copy(array)


def equal(a: Any, b: Any) -> bool:
    """Equal by `==`, or where that gives no answer (arrays, nan, objects without it) by how they pickle."""
    with suppress(Exception):
        if a is b or (a == b) is True:
            return True
    with suppress(Exception):
        return pickle.dumps(a) == pickle.dumps(b)
    return False
