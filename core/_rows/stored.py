"""Rows that stay with the workers that made them: what the driver holds, and hands to the ranks that get them.

Of a call that was made by `.later` the batches of the answers stay in the transport's store. The driver gets a
StoredPart of each: which columns, how many rows, and handles. Joined they are StoredRows, which are dealt like a batch;
a rank of the next group gets RowsToFetch: which rows of which parts. Columns above 1 MB are objects of their own, so
that a rank that reads others does not fetch them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import attrs

from core._rows.shards import Range, Run, Shard, located, runs_of
from core._rows.table import Get, PartTable, Table, WholeTable
from core._rows.wire_tensor import num_bytes
from core.errors import Refused

if TYPE_CHECKING:
    from tensordict import TensorDict

    from core._rows.rows import Rows, WireRows

OWN_OBJECT_BYTES = 1 << 20
INLINE_BYTES = 64 << 10  # rows of fewer bytes travel with the answer


@attrs.frozen(eq=False)
class StoredPart(PartTable):
    """One rank's batch.

    Attributes:
        rest: the columns that are no objects of their own: Rows on the wire, or a handle.
        row_tokens, row_groups: what dealing asks of the rows, so that it need not fetch them; see core._rows.table.
    """

    rank: int
    num: int
    forms: Mapping[str, tuple[Any, ...]]
    metadata: Mapping[str, Any]
    rest: Any
    own: Mapping[str, Any]
    row_tokens: Sequence[int] | None = None
    row_groups: Sequence[int] | None = None

    @classmethod
    def of(cls, rows: WireRows, rank: int, put: Callable[[Any], Any]) -> StoredPart:
        """Put rows, which are in the form for the wire, into the store."""
        from core._rows.rows import Metadata, form_of

        sizes = {name: num_bytes(column) for name, column in rows.columns.items()}
        own = {name: put(rows.columns[name]) for name, size in sizes.items() if size > OWN_OBJECT_BYTES}
        rest: Any = rows.only(lambda name: name not in own)
        rest = put(rest) if num_bytes(rest) > INLINE_BYTES else rest
        forms = {name: form_of(column) for name, column in rows.columns.items()}
        metadata = {name: column.value for name, column in rows.columns.items() if isinstance(column, Metadata)}
        groups = rows.row_groups() if forms.get("group_id") == ("dense", "int64") else None
        return cls(rank, rows.num, forms, metadata, rest, own, rows.row_tokens(), groups)

    def __len__(self) -> int:
        return self.num

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.forms)

    @staticmethod
    def joined(parts: Sequence[StoredPart], where: str = "") -> StoredRows:
        from core._rows.rows import check_forms, check_metadata

        check_forms([part.forms for part in parts], where)
        for name in parts[0].metadata:
            check_metadata(name, [part.metadata[name] for part in parts], where)
        return StoredRows(tuple(parts), tuple((i, 0, part.num) for i, part in enumerate(parts)), tuple(parts[0].forms))

    def batch(self, get: Get | None = None, tensor: Callable[[Any], Any] | None = None) -> TensorDict:
        return StoredPart.joined([self]).to_fetch([(0, self.num)]).batch(get)

    def fetched(self, get: Get, columns: Collection[str] | None = None) -> WireRows:
        """The rows, on the wire; only these columns where given."""
        from core._rows.rows import WireRows

        own = {name: handle for name, handle in self.own.items() if columns is None or name in columns}
        inline = isinstance(self.rest, WireRows)
        values = get([*own.values(), *([] if inline else [self.rest])])
        rest: WireRows = self.rest if inline else values.pop()
        by_name = rest.columns | dict(zip(own, values, strict=True))
        names = [name for name in self.forms if columns is None or name in columns]
        return WireRows(self.num, {name: by_name[name] for name in names}, rest.offsets)

    def cut(self, ranges: Sequence[Range], names: Collection[str], get: Get, put: Any) -> StoredPart:
        """Some rows as a part of their own; run where this one lies."""
        return StoredPart.of(self.fetched(get, names).take(ranges), self.rank, put)


@attrs.frozen(eq=False)
class StoredRows(WholeTable):
    """A batch in parts that lie with workers.

    Attributes:
        runs: which rows of which part follow one another.
        names: its columns.
        source: the transport whose workers have the parts.
        origin: the call that made it, for errors.
    """

    parts: tuple[StoredPart, ...]
    runs: tuple[Run, ...]
    names: tuple[str, ...]
    source: Any = None
    origin: str = ""

    def __len__(self) -> int:
        return sum(stop - start for _, start, stop in self.runs)

    def __getitem__(self, name: str) -> Any:
        """A column, which alone is fetched."""
        return self.only(lambda other: other == name).batch().get(name)

    def only(self, is_chosen: Callable[[str], bool]) -> StoredRows:
        return attrs.evolve(self, names=tuple(name for name in self.names if is_chosen(name)))

    def row_tokens(self) -> list[int] | None:
        return self._of_rows([part.row_tokens for part in self.parts])

    def row_groups(self) -> list[int] | None:
        if "group_id" not in self.names:
            return None
        groups = self._of_rows([part.row_groups for part in self.parts])
        if groups is None:
            forms = {part.rank: part.forms["group_id"] for part in self.parts}
            raise Refused("group_id names the group of each row", have=forms, want="int64 (rows,)", where=self.origin)
        return groups

    def _of_rows(self, by_part: Sequence[Sequence[int] | None]) -> list[int] | None:
        values: list[int] = []
        for part, start, stop in self.runs:
            if (of_part := by_part[part]) is None:
                return None
            values += of_part[start:stop]
        return values

    def shard(self, shard: Shard, *, with_weights: bool) -> RowsToFetch:
        return self.to_fetch(shard.ranges(), tuple(shard.copies()) if with_weights else None)

    def restored(self, shards: tuple[Shard, ...], rows_per_input: int) -> StoredRows:
        return attrs.evolve(self, runs=runs_of(shards, rows_per_input))

    def result(self, source: Any, origin: str) -> StoredRows:
        return attrs.evolve(self, source=source, origin=origin)

    def on_wire(self) -> RowsToFetch:
        return self.to_fetch([(0, len(self))])

    def batch(self, get: Get | None = None, tensor: Callable[[Any], Any] | None = None) -> TensorDict:
        return self.on_wire().batch(get or self.source.fetch)

    def to_fetch(self, ranges: Sequence[Range], copies: tuple[int, ...] | None = None) -> RowsToFetch:
        """Rows of the ranges, in that order, for a rank that gets them."""
        if getattr(self.source, "ended", False):
            raise Refused(
                f"the rows that {self.origin} made are gone: its workers have been ended",
                where=self.origin,
                mend="ask for the result before the group is shut down",
            )
        runs = located(self.runs, ranges) or ((0, 0, 0),)  # of no rows the columns are still needed
        used = sorted({part for part, _, _ in runs})
        number = {part: i for i, part in enumerate(used)}
        return RowsToFetch(
            tuple(self.parts[part] for part in used),
            tuple((number[part], start, stop) for part, start, stop in runs),
            self.names,
            self.source,
            self.origin,
            copies,
        )


@attrs.frozen(eq=False)
class RowsToFetch(Table):
    """Rows that a rank fetches when its method is about to run. `copies` tells what is filler, where there is any; see
    Shard.copies."""

    parts: tuple[Any, ...]  # StoredPart, or a handle of one
    runs: tuple[Run, ...]
    names: tuple[str, ...]
    source: Any
    origin: str
    copies: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return sum(stop - start for _, start, stop in self.runs)

    def cut_at(self, cut: Callable[[StoredPart, Sequence[Range], tuple[str, ...]], Any]) -> RowsToFetch:
        """The same with parts of which only some rows are needed cut where they lie, if `cut` does so."""
        parts, runs = list(self.parts), list(self.runs)
        for i, part in enumerate(self.parts):
            of_part = [at for at, run in enumerate(runs) if run[0] == i]
            ranges = [runs[at][1:] for at in of_part]
            handle = cut(part, ranges, self.names)
            if handle is not None:
                parts[i], behind = handle, 0
                for at, (start, stop) in zip(of_part, ranges, strict=True):
                    runs[at] = (i, behind, behind + stop - start)
                    behind += stop - start
        return attrs.evolve(self, parts=tuple(parts), runs=tuple(runs), source=None)

    def batch(self, get: Get | None = None, tensor: Callable[[Any], Any] | None = None) -> TensorDict:
        if get is None:
            raise Refused(f"the rows that {self.origin} made lie in a store that is not given", where=self.origin)
        return self.rows(get).batch()

    def rows(self, get: Get) -> Rows:
        """The rows, in memory of their own."""
        from core._rows.rows import FEW_RANGES, WireRows

        try:
            handles = {i: part for i, part in enumerate(self.parts) if not isinstance(part, StoredPart)}
            cuts = dict(zip(handles, get(list(handles.values())), strict=True)) if handles else {}
            parts = [cuts.get(i, part).fetched(get, self.names) for i, part in enumerate(self.parts)]
        except Refused:
            raise
        except Exception as error:
            raise RuntimeError(f"the rows that {self.origin} made cannot be fetched: {error}") from error
        if len(self.runs) <= FEW_RANGES:
            rows = WireRows.concat([parts[i].take([(start, stop)]) for i, start, stop in self.runs], self.origin)
        else:
            first = [0, *accumulate(len(part) for part in parts)]
            ranges = [(first[i] + start, first[i] + stop) for i, start, stop in self.runs]
            rows = WireRows.concat(parts, self.origin).take(ranges)
        return rows.tensors() if self.copies is None else rows.tensors().weighted(self.copies)
