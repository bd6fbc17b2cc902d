"""A batch taken apart: the form in which rows are cut, picked and joined.

A TensorDict's jagged columns are nested tensors, whose every operation is a dispatch of a tenth of a millisecond. Here
a jagged column is its flat values and shared offsets, an object column a list. Whole columns are moved, never single
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

import attrs
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from core._rows.columns import (
    ObjectColumn,
    Objects,
    flat,
    group_ids,
    is_jagged,
    nested,
    object_column,
    objects_of,
    ragged_dim,
    starts,
)
from core._rows.shards import Range, Shard, are_in_order
from core._rows.table import Get, PartTable, WholeTable
from core._rows.wire_tensor import (
    WireTensor,
    concatenated,
    cut_offsets,
    equal,
    joined_offsets,
    num_bytes,
    shared,
    to_wire,
)
from core.errors import Refused

R = TypeVar("R", bound="Rows")
FEW_RANGES = 16  # more of them are picked row by row


@attrs.frozen(eq=False, slots=True)
class Jagged:
    """Tokens of all rows in order, (tokens, ...).

    Attributes:
        offsets: an index into Rows.offsets, so that columns can share them.
        dim: the column's ragged dim, which `values` have first: 2 for (rows, 3, tokens).
    """

    values: torch.Tensor
    offsets: int
    dim: int = 1

    def __reduce__(self) -> tuple[Any, ...]:
        return Jagged, (self.values, self.offsets, self.dim)

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes)


@attrs.frozen(eq=False, slots=True)
class Metadata:
    """One Python object for all rows."""

    value: Any


@attrs.frozen(eq=False)
class Rows(WholeTable):
    """A batch's columns by name: tensors (rows, ...), Jagged, Objects, Metadata, or Rows.

    Attributes:
        num: number of rows.
        offsets: int64 (num + 1) each, beginning at 0: where rows begin and end in the values of jagged columns.
    """

    num: int
    columns: dict[str, Any]
    offsets: list[Any]
    _wire: Any = attrs.field(default=None, init=False, repr=False)

    @classmethod
    def of(cls, batch: TensorDictBase) -> Rows:
        """Take a TensorDict apart. Tensors are detached, not copied."""
        if len(batch.batch_size) != 1:
            raise Refused("a batch has rows: its batch_size is (rows,)", have=tuple(batch.batch_size))
        offsets: list[torch.Tensor] = []
        places: dict[int, int] = {}  # by id: the offsets live in the list

        def apart(column: Any) -> Any:
            if isinstance(column, NonTensorStack):
                return objects_of(column)
            if isinstance(column, NonTensorData):
                return Metadata(column.data)
            if isinstance(column, TensorDictBase):
                return cls.of(column)
            if type(column) is torch.Tensor or not is_jagged(column):
                return column.detach()
            values, column_offsets = flat(column)
            if id(column_offsets) not in places:
                places[id(column_offsets)] = len(offsets)
                offsets.append(column_offsets)
            return Jagged(values, places[id(column_offsets)], ragged_dim(column))

        table = {name: apart(batch.get(name)) for name in batch.keys()}  # noqa: SIM118
        return cls(int(batch.batch_size[0]), table, offsets)

    def __len__(self) -> int:
        return self.num

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.columns)

    def result(self, source: Any, origin: str) -> TensorDict:
        return self.batch()

    def on_wire(self) -> WireRows:
        if self._wire is None:  # once, whatever number of shards is cut from it
            object.__setattr__(self, "_wire", self._map(WireRows, to_wire, lambda objects: objects.pickled()))
        wire: WireRows = self._wire
        return wire

    @property
    def nbytes(self) -> int:
        """Bytes of tensors and pickled objects."""
        return num_bytes(self.columns) + num_bytes(self.offsets)

    def batch(self, get: Get | None = None, tensor: Callable[[Any], Any] | None = None) -> TensorDict:
        """The TensorDict again. Columns that share offsets can be computed with together."""

        def whole(column: Any) -> Any:
            match column:
                case Jagged():
                    tokens = nested(column.values, self.offsets[column.offsets])
                    return tokens if column.dim == 1 else tokens.transpose(1, column.dim)
                case Objects():
                    return ObjectColumn.of(column, self.num) if self.num else object_column(column.values)
                case Metadata():
                    return NonTensorData(column.value, batch_size=[self.num])
                case Rows():
                    return column.batch()
            return column

        table = {name: whole(column) for name, column in self.columns.items()}
        # Unchecked, since `set` asks each column for its shape, which costs a dispatch for a nested tensor.
        return TensorDict._new_unsafe(table, torch.Size([self.num]))

    def take(self, ranges: Sequence[Range]) -> Self:
        """The rows of the ranges, in the order given. One range gives views, several give copies."""
        if len(ranges) != 1:
            return type(self).concat([self.take([each]) for each in ranges or [(0, 0)]])
        start, stop = ranges[0]

        edges = [self._edges(offsets, start, stop) for offsets in self.offsets]

        def cut(column: Any) -> Any:
            match column:
                case Jagged():
                    low, high = edges[column.offsets]
                    return Jagged(column.values[low:high], column.offsets, column.dim)
                case Objects():
                    return Objects(column.values[start:stop])
                case Rows():
                    return column.take(ranges)
                case Metadata():
                    return column
            return column[start:stop]

        columns = {name: cut(column) for name, column in self.columns.items()}
        return type(self)(stop - start, columns, [self._cut_offsets(old, start, stop) for old in self.offsets])

    def select(self, index: torch.Tensor) -> Rows:
        """Copies of the rows in `index` (int64), in that order; rows may repeat."""
        index = index.to(torch.int64)
        new = [starts(old.diff()[index.to(old.device)]) for old in self.offsets]
        shift = [
            torch.repeat_interleave(old[index.to(old.device)] - starts_of_rows[:-1], starts_of_rows.diff())
            for old, starts_of_rows in zip(self.offsets, new, strict=True)
        ]
        at = [torch.arange(len(each), device=each.device) + each for each in shift]

        def pick(column: Any) -> Any:
            match column:
                case Jagged():
                    return Jagged(column.values.index_select(0, at[column.offsets]), column.offsets, column.dim)
                case Objects():
                    return Objects([column.values[row] for row in index.tolist()])
                case Rows():
                    return column.select(index)
                case Metadata():
                    return column
            return column.index_select(0, index.to(column.device))  # a third of what column[index] takes

        return Rows(len(index), {name: pick(column) for name, column in self.columns.items()}, new)

    def weighted(self, copies: Sequence[int]) -> Rows:
        """The same with `row_weight`, which is 0 for filler, and groups that are filler told apart.

        Args:
            copies: for each row -1, or of filler the number of the copy: rows of one group are one copy.
        """
        number = torch.tensor(copies, dtype=torch.int64)
        columns = dict(self.columns)
        columns["row_weight"] = columns.get("row_weight", torch.ones(self.num)) * (number < 0)
        if (ids := columns.get("group_id")) is not None:
            columns["group_id"] = torch.where(number < 0, ids, ids.max() + 1 + number)
        return Rows(self.num, columns, self.offsets)

    def only(self, is_chosen: Callable[[str], bool]) -> Rows:
        return type(self)(self.num, {name: c for name, c in self.columns.items() if is_chosen(name)}, self.offsets)

    def shard(self, shard: Shard, *, with_weights: bool) -> Rows:
        ranges = shard.ranges()
        if len(ranges) <= FEW_RANGES and not with_weights:
            return self.on_wire().take(ranges)
        rows = self.select(torch.tensor([row for start, stop in ranges for row in range(start, stop)]))
        return rows.weighted(shard.copies()) if with_weights else rows

    def row_tokens(self) -> list[int] | None:
        lengths: list[int]
        for name in ("input_ids", "prompt_ids", *self.columns):
            if isinstance(column := self.columns.get(name), Jagged):
                lengths = self.offsets[column.offsets].diff().tolist()
                return lengths
        if (mask := self.columns.get("attention_mask")) is None:
            return None
        lengths = mask.bool().sum(1).tolist()
        return lengths

    def row_groups(self) -> list[int] | None:
        return group_ids(self.columns["group_id"]) if "group_id" in self.columns else None

    def restored(self, shards: tuple[Shard, ...], rows_per_input: int) -> Rows:
        if are_in_order(shards):
            return self
        order = torch.tensor([row for shard in shards for row in shard.row_numbers()])
        back = torch.argsort(order, stable=True)[int((order < 0).sum()) :]
        return self.select((back[:, None] * rows_per_input + torch.arange(rows_per_input)).reshape(-1))

    def _map(self, cls: type[R], tensor: Callable[[Any], Any], objects: Callable[[Any], Any]) -> R:
        """The same as `cls`, with every tensor and object column replaced."""

        def of(column: Any) -> Any:
            match column:
                case Jagged():
                    return Jagged(tensor(column.values), column.offsets, column.dim)
                case Rows():
                    return column._map(cls, tensor, objects)
                case Objects():
                    return objects(column)
                case Metadata():
                    return column
            return tensor(column)

        columns = {name: of(column) for name, column in self.columns.items()}
        return cls(self.num, columns, [tensor(offsets) for offsets in self.offsets])

    # What differs between tensors and arrays.

    @staticmethod
    def _edges(offsets: Any, start: int, stop: int) -> tuple[int, int]:
        return int(offsets[start]), int(offsets[stop])

    @staticmethod
    def _cut_offsets(offsets: Any, start: int, stop: int) -> Any:
        return offsets[start : stop + 1] - offsets[start]

    @staticmethod
    def _join_offsets(parts: Sequence[Any]) -> Any:
        return starts(torch.cat([offsets.diff() for offsets in parts]))

    @staticmethod
    def _join(parts: Sequence[Any]) -> Any:
        return torch.cat(list(parts))

    @classmethod
    def concat(cls, parts: Sequence[Rows], where: str = "") -> Self:
        """Rows of all parts one after another, always copies.

        Raises:
            Refused: columns differ in name, form, dtype or width, or metadata in value.
        """
        if not parts:
            raise Refused("there is no batch to concatenate", where=where)
        check_forms([{name: form_of(each) for name, each in part.columns.items()} for part in parts], where)
        offsets: list[Any] = []
        places: dict[tuple[int, ...], int] = {}  # which of the parts' offsets were joined to which

        def join(name: str) -> Any:
            columns = [part.columns[name] for part in parts]
            match columns[0]:
                case Jagged():
                    key = tuple(column.offsets for column in columns)
                    if key not in places:
                        places[key] = len(offsets)
                        offsets.append(cls._join_offsets([part.offsets[i] for part, i in zip(parts, key, strict=True)]))
                    return Jagged(cls._join([column.values for column in columns]), places[key], columns[0].dim)
                case Objects():
                    if all(column.pickles for column in columns):
                        return Objects(None, [data for column in columns for data in column.pickles])
                    return Objects([value for column in columns for value in column.values])
                case Metadata():
                    check_metadata(name, [column.value for column in columns], where)
                    return columns[0]
                case Rows():
                    return cls.concat(columns, where)
            return cls._join(columns)

        table = {name: join(name) for name in parts[0].columns}
        return cls(sum(part.num for part in parts), table, offsets)


class WireRows(Rows, PartTable):
    """Rows in the form that crosses between processes: their tensors are WireTensors, whose rows cost less to cut and
    join."""

    def on_wire(self) -> WireRows:
        return self

    def result(self, source: Any, origin: str) -> TensorDict:
        return self.tensors().batch()  # joined, so in memory of its own

    def batch(self, get: Get | None = None, tensor: Callable[[Any], Any] | None = None) -> TensorDict:
        return self.tensors(tensor or shared).batch()

    def restored(self, shards: tuple[Shard, ...], rows_per_input: int) -> Rows:
        return self if are_in_order(shards) else self.tensors().restored(shards, rows_per_input)

    def row_tokens(self) -> list[int] | None:
        return self.tensors().row_tokens()

    def row_groups(self) -> list[int] | None:
        return self.tensors().row_groups()

    def select(self, index: torch.Tensor) -> Rows:
        return self.tensors().select(index)

    def tensors(self, tensor: Callable[[Any], Any] = shared) -> Rows:
        """The rows with tensors, each made by `tensor` of its WireTensor."""
        return self._map(Rows, tensor, lambda objects: objects)

    @staticmethod
    def joined(parts: Sequence[WireRows], where: str = "") -> WireRows:
        return WireRows.concat(parts, where)

    @staticmethod
    def _edges(offsets: WireTensor, start: int, stop: int) -> tuple[int, int]:
        return int(offsets.array[start]), int(offsets.array[stop])

    _cut_offsets = staticmethod(cut_offsets)
    _join_offsets = staticmethod(joined_offsets)
    _join = staticmethod(concatenated)


def form_of(column: Any) -> tuple[Any, ...]:
    """What columns must have in common to be joined; of tensors, or of their form on the wire."""
    match column:
        case Jagged():
            return ("jagged", str(column.values.dtype), *column.values.shape[1:], f"ragged dim {column.dim}")
        case Objects() | Metadata() | Rows():
            return (type(column).__name__.lower(),)
    return ("dense", str(column.dtype), *column.shape[1:])


def check_forms(parts: Sequence[Mapping[str, tuple[Any, ...]]], where: str) -> None:
    """Raises Refused where the parts' columns, each a form by name, cannot be joined."""
    if len({frozenset(part) for part in parts}) != 1:
        have = {i: sorted(part) for i, part in enumerate(parts)}
        raise Refused("batches to be joined have different columns", have=have, where=where)
    for name in parts[0]:
        forms = [part[name] for part in parts]
        if len(set(forms)) != 1:
            raise Refused(
                f"column {name!r} cannot be joined",
                have=forms,
                where=where,
                mend="return token columns jagged" if len({form[:2] for form in forms}) == 1 else "",
            )


def check_metadata(name: str, values: Sequence[Any], where: str) -> None:
    """Raises Refused where metadata are not the same in all parts."""
    if not all(equal(value, values[0]) for value in values):
        raise Refused(f"metadata {name!r} differs between shards", have=list(values), where=where)
