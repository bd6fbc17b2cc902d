"""A batch taken apart: the form in which rows are cut, picked and joined.

A TensorDict's jagged columns are nested tensors, whose every operation is a dispatch of a tenth of a millisecond. Here
a jagged column is its flat values and shared offsets, an object column a list. Whole columns are moved, never single
rows.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import attrs
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from core.errors import Refused

Range = tuple[int, int]  # rows start..stop-1


@attrs.frozen(eq=False, slots=True)
class Jagged:
    """Tokens of all rows in order; `offsets` is an index into Rows.offsets, so that columns can share them."""

    values: torch.Tensor
    offsets: int


@attrs.frozen(eq=False, slots=True)
class Objects:
    """One Python object a row."""

    values: list[Any]


@attrs.frozen(eq=False, slots=True)
class Metadata:
    """One Python object for all rows."""

    value: Any


@attrs.frozen(eq=False)
class Rows:
    """A batch's columns by name: tensors (rows, ...), Jagged, Objects, Metadata, or Rows.

    Attributes:
        num: number of rows.
        offsets: int64 (num + 1) each, beginning at 0: where rows begin and end in the values of jagged columns.
    """

    num: int
    columns: dict[str, Any]
    offsets: list[torch.Tensor]

    @classmethod
    def of(cls, batch: TensorDictBase) -> Rows:
        """Take a TensorDict apart. Tensors are detached, not copied."""
        if len(batch.batch_size) != 1:
            raise Refused("a batch has rows: its batch_size is (rows,)", have=tuple(batch.batch_size))
        offsets: list[torch.Tensor] = []
        seen: dict[int, int] = {}  # by id: the offsets live in the list

        def apart(column: Any) -> Any:
            if isinstance(column, NonTensorStack):
                return Objects([item.data for item in column.tensordicts])
            if isinstance(column, NonTensorData):
                return Metadata(column.data)
            if isinstance(column, TensorDictBase):
                return cls.of(column)
            if not column.is_nested:
                return column.detach()
            values, found = flat(column)
            if id(found) not in seen:
                seen[id(found)] = len(offsets)
                offsets.append(found)
            return Jagged(values, seen[id(found)])

        table = {name: apart(batch.get(name)) for name in batch.keys()}  # noqa: SIM118
        return cls(int(batch.batch_size[0]), table, offsets)

    def batch(self) -> TensorDict:
        """The TensorDict again. Columns that share offsets can be computed with together."""
        out = TensorDict({}, batch_size=[self.num])
        for name, column in self.columns.items():
            match column:
                case Jagged():
                    offsets = self.offsets[column.offsets].to(column.values.device)
                    column = torch.nested.nested_tensor_from_jagged(column.values, offsets)
                case Objects():
                    column = object_column(column.values)
                case Metadata():
                    column = NonTensorData(column.value, batch_size=[self.num])
                case Rows():
                    column = column.batch()
            out.set(name, column)
        return out

    def take(self, ranges: Sequence[Range]) -> Rows:
        """The rows of the ranges, in the order given. One range gives views, several give copies."""
        if len(ranges) != 1:
            return Rows.concat([self.take([each]) for each in ranges or [(0, 0)]])
        start, stop = ranges[0]

        def cut(column: Any) -> Any:
            match column:
                case Jagged():
                    old = self.offsets[column.offsets]
                    return Jagged(column.values[int(old[start]) : int(old[stop])], column.offsets)
                case Objects():
                    return Objects(column.values[start:stop])
                case Rows():
                    return column.take(ranges)
                case Metadata():
                    return column
            return column[start:stop]

        return self._map(stop - start, cut, [old[start : stop + 1] - old[start] for old in self.offsets])

    def select(self, index: torch.Tensor) -> Rows:
        """Copies of the rows in `index` (int64), in that order; rows may repeat."""
        index = index.to(torch.int64)
        new = [starts(old.diff()[index.to(old.device)]) for old in self.offsets]
        shift = [
            torch.repeat_interleave(old[index.to(old.device)] - made[:-1], made.diff())
            for old, made in zip(self.offsets, new, strict=True)
        ]
        at = [torch.arange(len(each), device=each.device) + each for each in shift]

        def pick(column: Any) -> Any:
            match column:
                case Jagged():
                    return Jagged(column.values[at[column.offsets]], column.offsets)
                case Objects():
                    return Objects([column.values[row] for row in index.tolist()])
                case Rows():
                    return column.select(index)
                case Metadata():
                    return column
            return column[index.to(column.device)]

        return self._map(len(index), pick, new)

    def _map(self, num: int, of_column: Callable[[Any], Any], offsets: list[torch.Tensor]) -> Rows:
        return Rows(num, {name: of_column(column) for name, column in self.columns.items()}, offsets)

    def map_tensors(self, function: Callable[[Any], Any]) -> Rows:
        """The same with every tensor replaced, for instance by its form on the wire."""

        def of(column: Any) -> Any:
            match column:
                case Jagged():
                    return Jagged(function(column.values), column.offsets)
                case Rows():
                    return column.map_tensors(function)
                case Objects() | Metadata():
                    return column
            return function(column)

        return self._map(self.num, of, [function(each) for each in self.offsets])

    @staticmethod
    def concat(parts: Sequence[Rows], where: str = "") -> Rows:
        """Rows of all parts one after another, always copies.

        Raises:
            Refused: columns differ in name, form, dtype or width, or metadata in value.
        """
        if not parts:
            raise Refused("there is no batch to concatenate", where=where)
        if len({frozenset(part.columns) for part in parts}) != 1:
            have = {i: sorted(part.columns) for i, part in enumerate(parts)}
            raise Refused("batches to be joined have different columns", have=have, where=where)
        offsets: list[torch.Tensor] = []
        joined: dict[tuple[int, ...], int] = {}  # which of the parts' offsets were joined to which

        def join(name: str) -> Any:
            columns = [part.columns[name] for part in parts]
            if len({_form(column) for column in columns}) != 1:
                same_but_width = len({_form(column)[:2] for column in columns}) == 1
                raise Refused(
                    f"column {name!r} cannot be joined",
                    have=[_form(column) for column in columns],
                    where=where,
                    mend="return token columns jagged" if same_but_width else "",
                )
            match columns[0]:
                case Jagged():
                    key = tuple(column.offsets for column in columns)
                    if key not in joined:
                        joined[key] = len(offsets)
                        lengths = [part.offsets[i].diff() for part, i in zip(parts, key, strict=True)]
                        offsets.append(starts(torch.cat(lengths)))
                    return Jagged(torch.cat([column.values for column in columns]), joined[key])
                case Objects():
                    return Objects([value for column in columns for value in column.values])
                case Metadata(value):
                    if not all(_equal(column.value, value) for column in columns):
                        have = [column.value for column in columns]
                        raise Refused(f"metadata {name!r} differs between shards", have=have, where=where)
                    return columns[0]
                case Rows():
                    return Rows.concat(columns, where)
            return torch.cat(columns)

        table = {name: join(name) for name in parts[0].columns}
        return Rows(sum(part.num for part in parts), table, offsets)


def is_batch(value: object) -> bool:
    """A TensorDict of columns, as against a tensordict's own wrappers of Python objects."""
    return isinstance(value, TensorDictBase) and not isinstance(value, NonTensorStack | NonTensorData)


def object_column(values: Sequence[Any]) -> NonTensorStack:
    """One Python object a row, kept by identity."""
    if values and not any(isinstance(value, list | tuple) for value in values):
        stack: NonTensorStack = NonTensorStack.from_list(list(values))  # quicker, but it would open lists
        return stack
    return NonTensorStack(*[NonTensorData(value) for value in values])


def contiguous(column: Any) -> Any:
    """The jagged column with its values packed without holes, tokens on dim 1."""
    if column.layout != torch.jagged:
        raise Refused("nested columns have layout torch.jagged", have=column.layout)
    if column._ragged_idx != 1:
        raise Refused("jagged columns have their ragged dim right after rows", have=column._ragged_idx)
    # The attributes, since each public accessor is a dispatch.
    offsets = column._offsets
    plain = column._lengths is None and int(offsets[0]) == 0 and int(offsets[-1]) == column._values.shape[0]
    return column if plain else column.contiguous()


def flat(column: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A jagged column's tokens in row order, and the offsets at which rows begin and end. Detached, not copied."""
    column = contiguous(column)
    return column._values.detach(), column._offsets


def starts(lengths: torch.Tensor) -> torch.Tensor:
    """Offsets of rows of the given lengths: int64 (rows + 1), from 0 to the sum."""
    return torch.nn.functional.pad(lengths.to(torch.int64).cumsum(0), (1, 0))


def _form(column: Any) -> tuple[Any, ...]:
    match column:
        case Jagged():
            return ("jagged", str(column.values.dtype), *column.values.shape[1:])
        case torch.Tensor():
            return ("dense", str(column.dtype), *column.shape[1:])
    return (type(column).__name__.lower(),)


def _equal(a: Any, b: Any) -> bool:
    """Equal by `==`, or where that gives no answer (arrays, nan, objects without it) by how they pickle."""
    with suppress(Exception):
        if a is b or (a == b) is True:
            return True
    with suppress(Exception):
        return pickle.dumps(a) == pickle.dumps(b)
    return False
