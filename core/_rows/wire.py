"""The form in which values cross between processes: tensors as numpy arrays, which Ray keeps out of the pickle stream.

torch tensors and TensorDicts pickle in-band (a 64 MB tensor costs 20 times a numpy array), and a pickled view carries
its whole storage. Here a tensor becomes an array of just its own elements. The receiver makes private copies, so what a
worker does to its input is seen by nobody else.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs

from core.errors import Refused

if TYPE_CHECKING:
    import numpy as np
    import torch

    from core._rows.rows import Rows


@attrs.frozen(slots=True)
class WireTensor:
    array: np.ndarray[Any, Any]  # the raw bytes of what numpy lacks
    dtype: str
    shape: tuple[int, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return WireTensor, (self.array, self.dtype, self.shape)  # a third of the time of the slots' states


@attrs.frozen(slots=True)
class WireArray:
    """A numpy array. Those within other objects are not found here, and arrive read-only from Ray."""

    array: np.ndarray[Any, Any]


@attrs.frozen(slots=True)
class WireNested:
    """A nested tensor by itself, as the only column of rows."""

    rows: Rows


def mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """The value with `leaf` done to what is in its tuples, lists and dicts."""
    if type(value) in (tuple, list):
        return type(value)(mapped(item, leaf) for item in value)
    if type(value) is dict:
        return {key: mapped(item, leaf) for key, item in value.items()}
    return leaf(value)


def encode(value: Any) -> Any:
    """Replace tensors and batches inside tuples, lists and dicts by their wire form.

    A batch becomes Rows that hold WireTensors. Cheap: contiguous CPU tensors are not copied. Other objects
    pass as they are.
    """
    return mapped(value, _encoded)


def _encoded(value: Any) -> Any:
    if (module := sys.modules.get("core._rows.remote")) is not None and isinstance(value, module.RemoteRows):
        return value.piece([(0, len(value))])
    if (numpy := sys.modules.get("numpy")) is not None and type(value) is numpy.ndarray and value.dtype != object:
        return WireArray(value)
    if "torch" not in sys.modules:
        return value
    import torch

    if isinstance(value, torch.Tensor) and not value.is_nested:
        return to_wire(value)
    if isinstance(value, torch.Tensor) or "tensordict" in sys.modules:
        from core._rows.rows import Jagged, Rows, flat, is_batch

        if is_batch(value):
            value = Rows.of(value)
        if isinstance(value, Rows):
            return value.map_tensors(to_wire, lambda objects: objects.pickled())
        if isinstance(value, torch.Tensor):
            values, offsets = flat(value)
            return WireNested(Rows(len(offsets) - 1, {"": Jagged(values, 0)}, [offsets]).map_tensors(to_wire))
    return value


def decode(value: Any, *, rows: bool = False, reads_only: bool = False, get: Any = None) -> Any:
    """The inverse of encode: tensors with memory of their own.

    Args:
        rows: leave batches as core._rows.rows.Rows, whose tensors may share read-only memory of the object store: for a
            reader that copies at once.
        reads_only: tensors may share that memory too: for a reader that writes to none.
        get: fetches values of the store by handles; what has to be fetched cannot be decoded without.
    """
    if value is None or (type(value) in (tuple, dict) and not value):
        return value
    with warnings.catch_warnings():  # torch warns of read-only arrays; where they are not copied, nobody writes to them
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return mapped(value, lambda each: _decoded(each, rows, shared if reads_only else _copied, get))


def _decoded(value: Any, rows: bool, tensor: Callable[[WireTensor], Any], get: Any) -> Any:
    if isinstance(value, WireTensor):
        return tensor(value)
    if isinstance(value, WireArray):
        return value.array if tensor is shared else _own(value.array)
    if isinstance(value, WireNested):
        return value.rows.map_tensors(tensor).batch().get("")
    if (module := sys.modules.get("core._rows.rows")) is not None and isinstance(value, module.Rows):
        return value.map_tensors(shared) if rows else value.map_tensors(tensor).batch()
    if (module := sys.modules.get("core._rows.remote")) is not None and isinstance(value, module.Fetch):
        return value.rows(get).batch()
    return value


def num_bytes(value: Any) -> int:
    """Bytes of the arrays and pickled objects in a value on the wire, or of a batch's tensors; the rest counts 0."""
    if type(value) in (tuple, list):
        return sum(map(num_bytes, value))
    if type(value) is dict:
        return sum(map(num_bytes, value.values()))
    if isinstance(value, WireTensor | WireArray):
        return int(value.array.nbytes)
    if isinstance(value, WireNested):
        return num_bytes(value.rows)
    if (module := sys.modules.get("core._rows.rows")) is not None:
        match value:
            case module.Rows():
                return num_bytes(value.columns) + num_bytes(value.offsets)
            case module.Jagged():
                return num_bytes(value.values)
            case module.Objects():
                return sum(map(len, value.pickles))
    return int(getattr(value, "nbytes", 0))


_NUMPY_LACKS = frozenset({"bfloat16", "complex32"})


def to_wire(tensor: torch.Tensor | WireTensor) -> WireTensor:
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
    import torch

    dtype = getattr(torch, wire.dtype)
    tensor = torch.from_numpy(copy(wire.array))
    return tensor if tensor.dtype == dtype else tensor.view(dtype).reshape(wire.shape)


def _copied(wire: WireTensor) -> torch.Tensor:
    return shared(wire, _own)


def _own(array: Any) -> Any:
    from core._rows.memory_pool import PAGES

    return PAGES.copy(array)


def contents(args: Any, kwargs: Any = {}) -> dict[str, Any]:  # noqa: B006
    """What a method is given, or answers, by what it is: each argument, and each column of those that are batches."""
    found: dict[str, Any] = {}
    for name, value in [*enumerate(args), *kwargs.items()]:
        columns: Any = {}
        if (module := sys.modules.get("core._rows.rows")) is not None and module.is_batch(value):
            columns = {each: module.read(value.get(each)) for each in value.keys()}  # noqa: SIM118
        elif module is not None and isinstance(value, module.Rows):
            columns = {each: getattr(column, "values", column) for each, column in value.columns.items()}
            found[f"offsets of argument {name!r}"] = value.offsets
        found |= {f"column {each!r} of argument {name!r}": column for each, column in columns.items()}
        if not columns:
            found[f"argument {name!r}"] = value
    return found


def digests(found: dict[str, Any]) -> dict[str, str]:
    """A digest of each of the contents."""
    return {what: hashlib.sha256(pickle.dumps(encode(each))).hexdigest() for what, each in found.items()}
