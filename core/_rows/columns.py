"""Columns of a batch: jagged nested tensors, and object columns.

Nested tensors dispatch each operation in a tenth of a millisecond; here they are made and taken apart without.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase

from core.errors import Refused

try:  # with it the questions and the making of jagged columns are no dispatches; but it is no public name of torch
    from torch.nested._internal.nested_tensor import NestedTensor
except ImportError:
    NestedTensor = None  # type: ignore[assignment,misc]


class Objects:
    """One Python object a row, or the pickles of runs of them until somebody reads `values`.

    So object columns that a worker passes on unread cost it nothing.
    """

    __slots__ = ("_values", "pickles")

    def __init__(self, values: list[Any] | None, pickles: Sequence[bytes] = ()) -> None:
        self._values, self.pickles = values, tuple(pickles)

    @property
    def values(self) -> list[Any]:
        if self._values is None:
            self._values = [value for each in self.pickles for value in pickle.loads(each)]
            self.pickles = ()  # whoever reads an object can change it
        return self._values

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.pickles))

    def pickled(self) -> Objects:
        """The form that crosses between processes."""
        if self._values is None:
            return self
        pickler: Any = pickle
        with suppress(ImportError):  # without Ray all ranks are in this process, and find every class by its name
            from ray import cloudpickle

            pickler = cloudpickle
        try:
            return Objects(None, [pickler.dumps(self._values)])
        except Exception as error:  # pickling runs any object's own code
            raise Refused(
                "an object column cannot be sent",
                have=f"{type(error).__name__}: {error}",
                want="values that can be pickled",
            ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return Objects, (self._values, self.pickles)


def is_batch(value: object) -> bool:
    """A TensorDict of columns, as against a tensordict's own wrappers of Python objects."""
    return isinstance(value, TensorDictBase) and not isinstance(value, NonTensorStack | NonTensorData)


class ObjectColumn(NonTensorStack):
    """An object column that makes its NonTensorData, one a row at some microseconds each, when one is looked at."""

    unread: Objects | None
    _members: list[Any]

    @classmethod
    def of(cls, objects: Objects, num: int) -> ObjectColumn:
        column = cls.__new__(cls)  # __init__ takes a third of a millisecond for a subclass
        state = vars(NonTensorStack(NonTensorData(None))) | {"_batch_size": torch.Size([num])}
        del state["tensordicts"]
        column.__dict__.update(state, _members=[], unread=objects)
        return column

    @property
    def tensordicts(self) -> list[Any]:
        if self.unread is not None:
            self._members, self.unread = [NonTensorData(value) for value in self.unread.values], None
        return self._members

    @tensordicts.setter
    def tensordicts(self, members: list[Any]) -> None:
        self._members, self.unread = members, None

    def _has_names(self) -> bool:
        return self.unread is None and bool(super()._has_names())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object_column, (objects_in(self),)


def objects_of(column: NonTensorStack) -> Objects:
    pickles = getattr(getattr(column, "unread", None), "pickles", ())
    return Objects(None, pickles) if pickles else Objects(objects_in(column))


def objects_in(column: NonTensorStack) -> list[Any]:
    unread = getattr(column, "unread", None)
    return [item.data for item in column.tensordicts] if unread is None else list(unread.values)


def read(column: Any) -> Any:
    """A column as it is; of an object column its objects."""
    return objects_in(column) if isinstance(column, NonTensorStack) else column


def object_column(values: Sequence[Any]) -> NonTensorStack:
    """One Python object a row, kept by identity."""
    return ObjectColumn.of(Objects(list(values)), len(values)) if values else NonTensorStack()


def is_jagged(value: object) -> bool:
    return type(value) is NestedTensor or (isinstance(value, torch.Tensor) and value.is_nested)


def nested(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The jagged column of the values; those with a gradient get it through the column.

    torch's own maker ends in the same constructor, by way of a dispatch that costs three times as much.
    """
    offsets = offsets.to(values.device)
    if values.requires_grad or NestedTensor is None:
        return torch.nested.nested_tensor_from_jagged(values, offsets)
    column: torch.Tensor = NestedTensor(values, offsets)
    return column


def contiguous(column: Any) -> Any:
    """The jagged column with its values packed without holes, tokens on dim 1."""
    if type(column) is not NestedTensor and column.layout != torch.jagged:
        raise Refused("nested columns have layout torch.jagged", have=column.layout)
    if column._ragged_idx != 1:
        raise Refused("jagged columns have their ragged dim right after rows", have=column._ragged_idx)
    # The attributes, since each public accessor is a dispatch.
    offsets = column._offsets
    plain = column._lengths is None and int(offsets[0]) == 0 and int(offsets[-1]) == column._values.shape[0]
    return column if plain else column.contiguous()


def ragged_dim(column: Any) -> int:
    """Which dim of a jagged column differs in length by row: 1 for (rows, tokens, ...)."""
    return int(getattr(column, "_ragged_idx", 1))


def flat(column: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A jagged column's tokens in row order, (tokens, ...) wherever its ragged dim is, and the offsets at which rows
    begin and end. Detached, not copied."""
    dim = ragged_dim(column)
    column = contiguous(column if dim == 1 else column.transpose(1, dim))
    return column._values.detach(), column._offsets


def starts(lengths: torch.Tensor) -> torch.Tensor:
    """Offsets of rows of the given lengths: int64 (rows + 1), from 0 to the sum."""
    return torch.nn.functional.pad(lengths.to(torch.int64).cumsum(0), (1, 0))


def group_ids(column: Any) -> list[int]:
    """The values of a column `group_id`.

    Raises:
        Refused: it is no int64 column of shape (rows,).
    """
    if not isinstance(column, torch.Tensor) or column.dtype != torch.int64 or is_jagged(column) or column.dim() != 1:
        have = f"{column.dtype} {tuple(column.shape)}" if isinstance(column, torch.Tensor) else type(column).__name__
        raise Refused("group_id names the group of each row", have=have, want="torch.int64 (rows,)")
    ids: list[int] = column.tolist()
    return ids
