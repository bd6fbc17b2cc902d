"""A batch taken apart: the form in which rows are cut, picked and joined.

A TensorDict's jagged columns are nested tensors, whose every operation is a dispatch of a tenth of a millisecond. Here
a jagged column is its flat values and shared offsets, an object column a list. Whole columns are moved, never single
rows.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import attrs
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from core._rows.memory_pool import PAGES, SMALL_BYTES
from core.errors import Refused

try:  # with it the questions and the making of jagged columns are no dispatches; but it is no public name of torch
    from torch.nested._internal.nested_tensor import NestedTensor
except ImportError:
    NestedTensor = None  # type: ignore[assignment,misc]

Range = tuple[int, int]  # rows start..stop-1


@attrs.frozen(eq=False, slots=True)
class Jagged:
    """Tokens of all rows in order; `offsets` is an index into Rows.offsets, so that columns can share them."""

    values: torch.Tensor
    offsets: int

    def __reduce__(self) -> tuple[Any, ...]:
        return Jagged, (self.values, self.offsets)


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

    def pickled(self) -> Objects:
        """The form that crosses between processes."""
        if self._values is None:
            return self
        from ray import cloudpickle

        return Objects(None, [cloudpickle.dumps(self._values)])

    def __reduce__(self) -> tuple[Any, ...]:
        return Objects, (self._values, self.pickles)


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
                return objects_of(column)
            if isinstance(column, NonTensorData):
                return Metadata(column.data)
            if isinstance(column, TensorDictBase):
                return cls.of(column)
            if type(column) is torch.Tensor or not is_jagged(column):
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

        def whole(column: Any) -> Any:
            match column:
                case Jagged():
                    return nested(column.values, self.offsets[column.offsets])
                case Objects():
                    return ObjectColumn.of(column, self.num) if self.num else object_column(column.values)
                case Metadata():
                    return NonTensorData(column.value, batch_size=[self.num])
                case Rows():
                    return column.batch()
            return column

        table = {name: whole(column) for name, column in self.columns.items()}
        # Unsafe is what isn't checked: `set` asks each column for its shape, which of a nested one is a dispatch.
        return TensorDict._new_unsafe(table, torch.Size([self.num]))

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

    def weighted(self, real: torch.Tensor) -> Rows:
        """The same with `row_weight`, which is 0 where `real` (bool, by row) is not."""
        weight = self.columns.get("row_weight", torch.ones(self.num))
        return Rows(self.num, {**self.columns, "row_weight": weight * real}, self.offsets)

    def only(self, wanted: Callable[[str], bool]) -> Rows:
        """The same of fewer columns."""
        return Rows(self.num, {name: each for name, each in self.columns.items() if wanted(name)}, self.offsets)

    def _map(self, num: int, of_column: Callable[[Any], Any], offsets: list[torch.Tensor]) -> Rows:
        return Rows(num, {name: of_column(column) for name, column in self.columns.items()}, offsets)

    def map_tensors(self, function: Callable[[Any], Any], objects: Callable[[Any], Any] = lambda each: each) -> Rows:
        """The same with every tensor and object column replaced, for instance by its form on the wire."""

        def of(column: Any) -> Any:
            match column:
                case Jagged():
                    return Jagged(function(column.values), column.offsets)
                case Rows():
                    return column.map_tensors(function, objects)
                case Objects():
                    return objects(column)
                case Metadata():
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
        check_forms([{name: form_of(each) for name, each in part.columns.items()} for part in parts], where)
        offsets: list[torch.Tensor] = []
        joined: dict[tuple[int, ...], int] = {}  # which of the parts' offsets were joined to which

        def join(name: str) -> Any:
            columns = [part.columns[name] for part in parts]
            match columns[0]:
                case Jagged():
                    key = tuple(column.offsets for column in columns)
                    if key not in joined:
                        joined[key] = len(offsets)
                        lengths = [part.offsets[i].diff() for part, i in zip(parts, key, strict=True)]
                        offsets.append(starts(torch.cat(lengths)))
                    return Jagged(_cat([column.values for column in columns]), joined[key])
                case Objects():
                    if all(column.pickles for column in columns):
                        return Objects(None, [each for column in columns for each in column.pickles])
                    return Objects([value for column in columns for value in column.values])
                case Metadata():
                    check_metadata(name, [column.value for column in columns], where)
                    return columns[0]
                case Rows():
                    return Rows.concat(columns, where)
            return _cat(columns)

        table = {name: join(name) for name in parts[0].columns}
        return Rows(sum(part.num for part in parts), table, offsets)


def _cat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """torch.cat, into memory that was used before where there is some."""
    first, num = tensors[0], sum(len(each) for each in tensors)
    num_bytes = num * first[:1].numel() * first.element_size()
    if num_bytes < SMALL_BYTES or first.device.type != "cpu":
        return torch.cat(list(tensors))
    out = torch.from_numpy(PAGES.take(num_bytes)).view(first.dtype).view(num, *first.shape[1:])
    return torch.cat(list(tensors), out=out)


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


def flat(column: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A jagged column's tokens in row order, and the offsets at which rows begin and end. Detached, not copied."""
    column = contiguous(column)
    return column._values.detach(), column._offsets


def starts(lengths: torch.Tensor) -> torch.Tensor:
    """Offsets of rows of the given lengths: int64 (rows + 1), from 0 to the sum."""
    return torch.nn.functional.pad(lengths.to(torch.int64).cumsum(0), (1, 0))


def form_of(column: Any) -> tuple[Any, ...]:
    """What columns must have in common to be joined; of tensors, or of their form on the wire."""
    match column:
        case Jagged():
            return ("jagged", str(column.values.dtype), *column.values.shape[1:])
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
    if not all(_equal(value, values[0]) for value in values):
        raise Refused(f"metadata {name!r} differs between shards", have=list(values), where=where)


def _equal(a: Any, b: Any) -> bool:
    """Equal by `==`, or where that gives no answer (arrays, nan, objects without it) by how they pickle."""
    with suppress(Exception):
        if a is b or (a == b) is True:
            return True
    with suppress(Exception):
        return pickle.dumps(a) == pickle.dumps(b)
    return False
