"""Rows that stay with the workers that made them: what the driver holds, and sends to those who shall have them.

A method of `blocking=False` leaves its batches in the store of its transport. The driver gets a Kept for each: which
columns, how many rows, and handles. Joined they are RemoteRows, which are dealt like a batch; a rank of the next group
gets a Fetch: which rows of which parts. Columns above 1 MB are objects of their own, so that who reads others does not
fetch them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs

from core._rows.rows import Metadata, Rows, check_forms, check_metadata, form_of
from core._rows.shards import Run, Shard, located, runs_of
from core._rows.wire import mapped, num_bytes, shared, to_wire
from core.errors import Refused

OWN_OBJECT_BYTES = 1 << 20
INLINE_BYTES = 64 << 10  # rows of fewer bytes travel with the answer
Get = Callable[[Sequence[Any]], list[Any]]


@attrs.frozen(eq=False)
class Kept:
    """One rank's batch. `rest` holds the columns that are no objects of their own: Rows on the wire, or a handle."""

    rank: int
    num: int
    forms: Mapping[str, tuple[Any, ...]]
    metadata: Mapping[str, Any]
    rest: Any
    own: Mapping[str, Any]

    @classmethod
    def of(cls, rows: Rows, rank: int, put: Callable[[Any], Any]) -> Kept:
        """Put rows, which are in the form for the wire, into the store."""
        sizes = {name: num_bytes(column) for name, column in rows.columns.items()}
        own = {name: put(rows.columns[name]) for name, size in sizes.items() if size > OWN_OBJECT_BYTES}
        rest: Any = Rows(rows.num, {k: v for k, v in rows.columns.items() if k not in own}, rows.offsets)
        rest = put(rest) if num_bytes(rest) > INLINE_BYTES else rest
        forms = {name: form_of(column) for name, column in rows.columns.items()}
        metadata = {name: each.value for name, each in rows.columns.items() if isinstance(each, Metadata)}
        return cls(rank, rows.num, forms, metadata, rest, own)

    def fetch(self, get: Get, columns: Collection[str] | None = None) -> Rows:
        """The rows, on the wire; only these columns where given."""
        own = {name: handle for name, handle in self.own.items() if columns is None or name in columns}
        inline = isinstance(self.rest, Rows)
        values = get([*own.values(), *([] if inline else [self.rest])])
        rest: Rows = self.rest if inline else values.pop()
        found = rest.columns | dict(zip(own, values, strict=True))
        wanted = [name for name in self.forms if columns is None or name in columns]
        return Rows(self.num, {name: found[name] for name in wanted}, rest.offsets)

    @staticmethod
    def concat(parts: Sequence[Kept], where: str = "") -> RemoteRows:
        """Rows of all parts one after another.

        Raises:
            Refused: columns differ in name, form, dtype or width, or metadata in value.
        """
        check_forms([part.forms for part in parts], where)
        for name in parts[0].metadata:
            check_metadata(name, [part.metadata[name] for part in parts], where)
        return RemoteRows(tuple(parts), tuple((i, 0, part.num) for i, part in enumerate(parts)), tuple(parts[0].forms))


@attrs.frozen(eq=False)
class RemoteRows:
    """A batch in parts that lie elsewhere.

    Attributes:
        runs: which rows of which part follow one another.
        names: its columns.
        source: the transport whose workers have the parts; set by the group.
        origin: the call that made it, for errors.
    """

    parts: tuple[Kept, ...]
    runs: tuple[Run, ...]
    names: tuple[str, ...]
    source: Any = None
    origin: str = ""

    def __len__(self) -> int:
        return sum(stop - start for _, start, stop in self.runs)

    def keys(self) -> tuple[str, ...]:
        return self.names

    def in_order(self, shards: tuple[Shard, ...], per_input: int) -> RemoteRows:
        return attrs.evolve(self, runs=runs_of(shards, per_input))

    def only(self, wanted: Callable[[str], bool]) -> RemoteRows:
        """The same of fewer columns."""
        return attrs.evolve(self, names=tuple(name for name in self.names if wanted(name)))

    def batch(self) -> RemoteRows:
        return self

    def read(self) -> Any:
        """The TensorDict, fetched to here."""
        return self.piece([(0, len(self))]).rows(self.source.fetch).batch()

    def __getitem__(self, name: str) -> Any:
        return self.only(lambda each: each == name).read().get(name)

    def piece(self, ranges: Sequence[tuple[int, int]], real: Sequence[bool] | None = None) -> Fetch:
        """Rows of the ranges, in that order, for who shall have them."""
        if getattr(self.source, "ended", False):
            raise Refused(
                f"the rows that {self.origin} made are gone: its workers have been ended",
                where=self.origin,
                mend="ask for the result before the group is shut down",
            )
        runs = located(self.runs, ranges) or ((0, 0, 0),)  # of no rows the columns are still wanted
        used = sorted({part for part, _, _ in runs})
        number = {part: i for i, part in enumerate(used)}
        return Fetch(
            tuple(self.parts[part] for part in used),
            tuple((number[part], start, stop) for part, start, stop in runs),
            self.names,
            self.source,
            self.origin,
            None if real is None else tuple(real),
        )


@attrs.frozen(eq=False)
class Fetch:
    """Rows that a rank fetches when its method is about to run. `real` marks what is no filler, where there is any."""

    parts: tuple[Any, ...]  # Kept, or a handle of one
    runs: tuple[Run, ...]
    names: tuple[str, ...]
    source: Any
    origin: str
    real: tuple[bool, ...] | None = None

    def cut_at(self, cut: Callable[[Kept, Sequence[tuple[int, int]], tuple[str, ...]], Any]) -> Fetch:
        """The same with parts of which only some rows are needed cut where they lie, if `cut` does so."""
        parts, runs = list(self.parts), list(self.runs)
        for i, part in enumerate(self.parts):
            mine = [at for at, run in enumerate(runs) if run[0] == i]
            ranges = [runs[at][1:] for at in mine]
            made = cut(part, ranges, self.names)
            if made is not None:
                parts[i], behind = made, 0
                for at, (start, stop) in zip(mine, ranges, strict=True):
                    runs[at] = (i, behind, behind + stop - start)
                    behind += stop - start
        return attrs.evolve(self, parts=tuple(parts), runs=tuple(runs), source=None)

    def rows(self, get: Get) -> Rows:
        """The rows, in memory of their own."""
        import torch

        try:
            handles = {i: part for i, part in enumerate(self.parts) if not isinstance(part, Kept)}
            cuts = dict(zip(handles, get(list(handles.values())), strict=True)) if handles else {}
            parts = [cuts.get(i, part).fetch(get, self.names) for i, part in enumerate(self.parts)]
        except Refused:
            raise
        except Exception as error:
            raise RuntimeError(f"the rows that {self.origin} made cannot be fetched: {error}") from error
        tensors = [part.map_tensors(shared) for part in parts]
        rows = Rows.concat([tensors[i].take([(start, stop)]) for i, start, stop in self.runs], self.origin)
        if self.real is not None:
            rows = rows.weighted(torch.tensor(self.real))
        return rows


def cut(part: Kept, ranges: Sequence[tuple[int, int]], names: Collection[str], get: Get, put: Any) -> Kept:
    """Some rows of a part as a part of their own; run where the part lies."""
    rows = part.fetch(get, names).map_tensors(shared).take(ranges)
    return Kept.of(rows.map_tensors(to_wire), part.rank, put)


def kept(value: Any, rank: int, put: Callable[[Any], Any]) -> Any:
    """An encoded answer with its batches put into the store."""
    return mapped(value, lambda each: Kept.of(each, rank, put) if isinstance(each, Rows) else each)


def stays(value: Any, source: Any, origin: str) -> Any:
    """A result with its remote batches told where they are."""
    return mapped(
        value, lambda each: attrs.evolve(each, source=source, origin=origin) if isinstance(each, RemoteRows) else each
    )


def fetched(value: Any) -> Any:
    """A result with all its batches fetched."""
    return mapped(value, lambda each: each.read() if isinstance(each, RemoteRows) else each)
