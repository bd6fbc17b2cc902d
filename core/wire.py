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

if TYPE_CHECKING:
    import numpy as np
    import torch


_NUMPY_LACKS = frozenset({"bfloat16", "complex32"})


@attrs.frozen(slots=True)
class WireTensor:
    array: np.ndarray[Any, Any]  # numpy has no bfloat16: then the raw bytes
    dtype: str
    shape: tuple[int, ...]


@attrs.frozen(slots=True)
class WireJagged:
    values: WireTensor
    offsets: int  # index into WireBatch.offsets: columns that share their offsets still do afterwards


@attrs.frozen(slots=True)
class WireObjects:
    values: list[Any]


@attrs.frozen(slots=True)
class WireMetadata:
    value: Any


@attrs.frozen(slots=True)
class WireBatch:
    rows: tuple[int, ...]
    columns: dict[str, Any]
    offsets: list[WireTensor]


def encode(value: Any) -> Any:
    """Replace tensors and batches inside tuples, lists and dicts by their wire form. Cheap: contiguous CPU tensors are
    not copied. Other objects pass as they are."""
    if type(value) in (tuple, list):
        return type(value)(encode(item) for item in value)
    if type(value) is dict:
        return {key: encode(item) for key, item in value.items()}
    if (torch := sys.modules.get("torch")) is not None and isinstance(value, torch.Tensor):
        return _encode_tensor(value) if not value.is_nested else _encode_columns({"": value}, ())
    if (tensordict := sys.modules.get("tensordict")) is not None and isinstance(value, tensordict.TensorDictBase):
        from core.batch import columns, is_batch

        if is_batch(value):
            return _encode_columns(columns(value), tuple(value.batch_size))
    return value


def decode(value: Any, *, copy: bool = True) -> Any:
    """The inverse of encode.

    Args:
        copy: give tensors memory of their own. Without it they may share read-only memory of the object store: only for
            a reader that copies at once.
    """
    with warnings.catch_warnings():  # torch warns of read-only arrays; without copy nobody writes to them
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return _decode(value, copy)


def _decode(value: Any, copy: bool) -> Any:
    if type(value) in (tuple, list):
        return type(value)(_decode(item, copy) for item in value)
    if type(value) is dict:
        return {key: _decode(item, copy) for key, item in value.items()}
    if isinstance(value, WireTensor):
        return _decode_tensor(value, copy)
    if isinstance(value, WireBatch):
        return _decode_columns(value, copy)
    return value


def _encode_tensor(tensor: torch.Tensor) -> WireTensor:
    import torch

    tensor = tensor.detach().to("cpu").contiguous()
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    if dtype in _NUMPY_LACKS or dtype.startswith("float8"):
        return WireTensor(tensor.reshape(-1).view(torch.uint8).numpy(), dtype, shape)
    return WireTensor(tensor.numpy(), dtype, shape)


def _decode_tensor(wire: WireTensor, copy: bool) -> torch.Tensor:
    import torch

    dtype = getattr(torch, wire.dtype)
    tensor = torch.from_numpy(wire.array.copy() if copy else wire.array)
    return tensor if tensor.dtype == dtype else tensor.view(dtype).reshape(wire.shape)


def _encode_columns(table: dict[str, Any], rows: tuple[int, ...]) -> WireBatch:
    from tensordict import NonTensorData, NonTensorStack

    from core.batch import columns, flat, is_batch, objects

    offsets: list[WireTensor] = []
    seen: dict[int, tuple[torch.Tensor, int]] = {}

    def of(column: Any) -> Any:
        if isinstance(column, NonTensorStack):
            return WireObjects(objects(column))
        if isinstance(column, NonTensorData):
            return WireMetadata(column.data)
        if is_batch(column):
            return _encode_columns(columns(column), tuple(column.batch_size))
        if not column.is_nested:
            return _encode_tensor(column)
        values, key = flat(column)
        if id(key) not in seen:
            seen[id(key)] = key, len(offsets)
            offsets.append(_encode_tensor(key))
        return WireJagged(_encode_tensor(values), seen[id(key)][1])

    return WireBatch(rows, {name: of(column) for name, column in table.items()}, offsets)


def _decode_columns(wire: WireBatch, copy: bool) -> Any:
    import torch
    from tensordict import NonTensorData, TensorDict

    from core.batch import object_column

    offsets = [_decode_tensor(each, copy) for each in wire.offsets]
    make: dict[type, Callable[[Any], Any]] = {
        WireTensor: lambda column: _decode_tensor(column, copy),
        WireBatch: lambda column: _decode_columns(column, copy),
        WireObjects: lambda column: object_column(column.values),
        WireMetadata: lambda column: NonTensorData(column.value, batch_size=wire.rows),
        WireJagged: lambda column: torch.nested.nested_tensor_from_jagged(
            _decode_tensor(column.values, copy), offsets[column.offsets]
        ),
    }
    table = {name: make[type(column)](column) for name, column in wire.columns.items()}
    if list(table) == [""]:
        return table[""]
    out = TensorDict({}, batch_size=wire.rows)
    for name, column in table.items():
        out.set(name, column)
    return out
