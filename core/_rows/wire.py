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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs

from core._rows.table import Deferred, Get, Table, WholeTable
from core._rows.wire_tensor import WireTensor, copied, own, shared, to_wire

if TYPE_CHECKING:
    import numpy as np

    from core._rows.rows import Rows


@attrs.frozen(slots=True)
class WireArray:
    """A numpy array. Those within other objects are not found here, and arrive read-only from Ray."""

    array: np.ndarray[Any, Any]

    @property
    def nbytes(self) -> int:
        return int(self.array.nbytes)


@attrs.frozen(slots=True)
class WireNested:
    """A nested tensor by itself, as the only column of rows."""

    rows: Rows

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes


def mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """The value with `leaf` done to what is in its tuples, lists and dicts."""
    if type(value) in (tuple, list):
        return type(value)(mapped(item, leaf) for item in value)
    if type(value) is dict:
        return {key: mapped(item, leaf) for key, item in value.items()}
    return leaf(value)


def encode(value: Any, leaf: Callable[[Any], Any] | None = None) -> Any:
    """Replace tensors and batches inside tuples, lists and dicts by the form that crosses between processes.

    A batch becomes Rows that hold WireTensors, a value that is yet to come is awaited. Cheap: contiguous CPU tensors
    are not copied. Other objects pass as they are.

    Args:
        leaf: what a transport does to each value before.
    """
    return mapped(value, lambda item: _encoded(item if leaf is None else leaf(item), leaf))


def table_of(value: Any) -> WholeTable | None:
    """A batch as a table; None for what is no batch."""
    if isinstance(value, WholeTable):
        return value
    if "tensordict" in sys.modules:
        from core._rows.columns import is_batch
        from core._rows.rows import Rows

        if is_batch(value):
            return Rows.of(value)
    return None


def _encoded(value: Any, leaf: Callable[[Any], Any] | None) -> Any:
    if isinstance(value, Deferred):
        return encode(value.awaited("an argument"), leaf)
    if (numpy := sys.modules.get("numpy")) is not None and type(value) is numpy.ndarray and value.dtype != object:
        return WireArray(value)
    if (torch := sys.modules.get("torch")) is not None and isinstance(value, torch.Tensor):
        if not value.is_nested:
            return to_wire(value)
        from core._rows.columns import flat
        from core._rows.rows import Jagged, Rows

        values, offsets = flat(value)
        return WireNested(Rows(len(offsets) - 1, {"": Jagged(values, 0)}, [offsets]).on_wire())
    table = table_of(value)
    return value if table is None else table.on_wire()


def decode(value: Any, *, reads_only: bool = False, get: Get | None = None) -> Any:
    """The inverse of encode: tensors with memory of their own.

    Args:
        reads_only: tensors may share read-only memory of the object store: for a reader that writes to none.
        get: gets values of the store by handles; what lies there cannot be had without.
    """
    if value is None or (type(value) in (tuple, dict) and not value):
        return value
    with reading():
        return mapped(value, lambda item: _decoded(item, shared if reads_only else copied, get))


@contextmanager
def reading() -> Iterator[None]:
    """torch warns of read-only arrays. Where they are not copied, nobody writes to them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        yield


def _decoded(value: Any, tensor: Callable[[WireTensor], Any], get: Get | None) -> Any:
    if isinstance(value, WireTensor):
        return tensor(value)
    if isinstance(value, WireArray):
        return value.array if tensor is shared else own(value.array)
    if isinstance(value, WireNested):
        return value.rows.batch(tensor=tensor).get("")
    if isinstance(value, Table):
        return value.batch(get, tensor)
    return value


def contents(args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a method is given, or answers, by what it is: each argument, and each column of those that are batches."""
    parts: dict[str, Any] = {}
    for name, value in [*enumerate(args), *(kwargs or {}).items()]:
        table: Any = table_of(value)
        if table is None:
            parts[f"argument {name!r}"] = value
            continue
        parts[f"offsets of argument {name!r}"] = table.offsets
        for column, content in table.columns.items():
            # Objects are read where they are: those that nobody has read yet are pickles, which give copies.
            content = value.get(column).tolist() if table is not value and hasattr(content, "pickles") else content
            parts[f"column {column!r} of argument {name!r}"] = getattr(content, "values", content)
    return parts


def digests(parts: Mapping[str, Any]) -> dict[str, str]:
    """A digest of each of the contents."""
    return {name: hashlib.sha256(pickle.dumps(encode(value))).hexdigest() for name, value in parts.items()}
