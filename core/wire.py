"""The form in which values cross between processes: tensors as numpy arrays, which Ray keeps out of the pickle stream.

torch tensors and TensorDicts pickle in-band (a 64 MB tensor costs 20 times a numpy array), and a pickled view carries
its whole storage. Here a tensor becomes an array of just its own elements. The receiver makes private copies, so what a
worker does to its input is seen by nobody else.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs

from core.errors import Refused

if TYPE_CHECKING:
    import numpy as np
    import torch

    from core.rows import Rows


@attrs.frozen(slots=True)
class WireTensor:
    array: np.ndarray[Any, Any]  # the raw bytes of what numpy lacks
    dtype: str
    shape: tuple[int, ...]


@attrs.frozen(slots=True)
class WireArray:
    """A numpy array. Those within other objects are not found here, and arrive read-only from Ray."""

    array: np.ndarray[Any, Any]


@attrs.frozen(slots=True)
class WireNested:
    """A nested tensor by itself, as the only column of rows."""

    rows: Rows


def encode(value: Any) -> Any:
    """Replace tensors and batches inside tuples, lists and dicts by their wire form.

    A batch becomes core.rows.Rows that hold WireTensors. Cheap: contiguous CPU tensors are not copied. Other objects
    pass as they are.
    """
    if type(value) in (tuple, list):
        return type(value)(encode(item) for item in value)
    if type(value) is dict:
        return {key: encode(item) for key, item in value.items()}
    if (numpy := sys.modules.get("numpy")) is not None and type(value) is numpy.ndarray and value.dtype != object:
        return WireArray(value)
    if "torch" not in sys.modules:
        return value
    import torch

    if isinstance(value, torch.Tensor) and not value.is_nested:
        return _to_wire(value)
    if isinstance(value, torch.Tensor) or "tensordict" in sys.modules:
        from core.rows import Jagged, Rows, flat, is_batch

        if is_batch(value):
            value = Rows.of(value)
        if isinstance(value, Rows):
            return value.map_tensors(_to_wire)
        if isinstance(value, torch.Tensor):
            values, offsets = flat(value)
            return WireNested(Rows(len(offsets) - 1, {"": Jagged(values, 0)}, [offsets]).map_tensors(_to_wire))
    return value


def decode(value: Any, *, rows: bool = False) -> Any:
    """The inverse of encode: tensors with memory of their own.

    Args:
        rows: leave batches as core.rows.Rows, whose tensors may share read-only memory of the object store: for a
            reader that copies at once.
    """
    with warnings.catch_warnings():  # torch warns of read-only arrays; where they are not copied, nobody writes to them
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return _decode(value, rows)


def _decode(value: Any, rows: bool) -> Any:
    if type(value) in (tuple, list):
        return type(value)(_decode(item, rows) for item in value)
    if type(value) is dict:
        return {key: _decode(item, rows) for key, item in value.items()}
    if isinstance(value, WireTensor):
        return _copied(value)
    if isinstance(value, WireArray):
        return value.array.copy()
    if isinstance(value, WireNested):
        return value.rows.map_tensors(_copied).batch().get("")
    if (module := sys.modules.get("core.rows")) is not None and isinstance(value, module.Rows):
        return value.map_tensors(_shared) if rows else value.map_tensors(_copied).batch()
    return value


_NUMPY_LACKS = frozenset({"bfloat16", "complex32"})


def _to_wire(tensor: torch.Tensor) -> WireTensor:
    import torch

    if tensor.layout != torch.strided or tensor.is_meta:
        raise Refused(
            "only dense and jagged tensors can be sent", have=f"{tensor.layout} on {tensor.device}", mend="to_dense()"
        )
    tensor = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    if dtype in _NUMPY_LACKS or dtype.startswith("float8"):
        return WireTensor(tensor.reshape(-1).view(torch.uint8).numpy(), dtype, shape)
    return WireTensor(tensor.numpy(), dtype, shape)


def _shared(wire: WireTensor, copy: Callable[[Any], Any] = lambda array: array) -> torch.Tensor:
    import torch

    dtype = getattr(torch, wire.dtype)
    tensor = torch.from_numpy(copy(wire.array))
    return tensor if tensor.dtype == dtype else tensor.view(dtype).reshape(wire.shape)


def _copied(wire: WireTensor) -> torch.Tensor:
    return _shared(wire, lambda array: array.copy())
