"""Dealing the rows of a batch to dp ranks, block by block. Pure arithmetic on row numbers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import Literal

import attrs

from core._rows.balance import are_balanced, balanced_parts
from core.errors import Refused

Uneven = Literal["error", "pad", "ragged"]
DealBy = Literal["rows", "tokens"]
Range = tuple[int, int]  # rows start..stop-1


@attrs.frozen
class Block:
    """One rank's rows of one block (mini-batch), by the driver's numbers.

    Attributes:
        rows: in the shard's order, in runs.
        filler: behind them copies that count nothing, each of one row, or of all rows of a group.
    """

    rows: tuple[Range, ...]
    filler: tuple[tuple[Range, ...], ...] = ()

    @property
    def num_real(self) -> int:
        return sum(stop - start for start, stop in self.rows)

    @property
    def num_filler(self) -> int:
        return sum(stop - start for copy in self.filler for start, stop in copy)


@attrs.frozen
class Shard:
    """Which rows of the driver's batch a call brings to a rank: from each block (mini-batch) of the batch some."""

    blocks: tuple[Block, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each block, filler included."""
        return tuple(block.num_real + block.num_filler for block in self.blocks)

    @property
    def num_real(self) -> int:
        """Rows that are no filler."""
        return sum(block.num_real for block in self.blocks)

    @property
    def has_filler(self) -> bool:
        return any(block.filler for block in self.blocks)

    def ranges(self) -> list[Range]:
        """The driver's rows that the shard consists of, in its order. Filler is copies of rows."""
        return _joined(run for block in self.blocks for runs in (block.rows, *block.filler) for run in runs)

    def row_numbers(self) -> list[int]:
        """The driver's number of each row of the shard, -1 for filler."""
        numbers: list[int] = []
        for block in self.blocks:
            for start, stop in block.rows:
                numbers += range(start, stop)
            numbers += [-1] * block.num_filler
        return numbers

    def copies(self) -> list[int]:
        """For each row of the shard -1, or of filler the number of the copy: rows of one group are one copy."""
        numbers: list[int] = []
        copies = 0
        for block in self.blocks:
            numbers += [-1] * block.num_real
            for copy in block.filler:
                numbers += [copies] * sum(stop - start for start, stop in copy)
                copies += 1
        return numbers


def deal_rows(
    num_rows: int,
    dp_size: int,
    num_blocks: int,
    where: str,
    uneven: Uneven = "error",
    *,
    tokens: Sequence[int] | None = None,
    groups: Sequence[int] | None = None,
) -> tuple[Shard, ...]:
    """The shard of each dp rank: from every block (mini-batch) some rows.

    Blocks are cut from the batch's rows in order, whatever the dp size. Where there are groups, "row" below means a
    whole group: it counts as one, and its place is that of its first row.

    Args:
        uneven: what to do where rows don't divide. "error": refuse. "pad": blocks as even as possible, each filled up
            with filler to a multiple of dp_size. "ragged": no filler; shards, and a block's parts, differ by at most
            one row.
        tokens: of each row. A block's rows are then dealt so that dp ranks get near-equal numbers of tokens, and as
            many rows as without. Where not given, or where runs are near-equal as they are, each dp rank gets the next
            run of rows.
        groups: of each row the group that it belongs to. Rows of one group stay together, in order.

    Raises:
        Refused: rows don't divide ("error"), or are too few for one in each part ("ragged") or block ("pad").
    """
    if num_blocks < 1:
        raise Refused("a batch is cut into at least one block", have=num_blocks, where=where)
    members = None if groups is None else list(rows_of_groups(groups).values())
    count = num_rows if members is None else len(members)
    unit = dp_size * num_blocks
    least = {"error": unit, "ragged": unit, "pad": num_blocks}[uneven]
    if count < least or (uneven == "error" and count % unit):
        raise _does_not_divide(
            count, "rows" if members is None else "groups", dp_size, num_blocks, least, where, uneven
        )
    weights = tokens
    if dp_size == 1:
        weights = None  # nothing to balance, and runs are cheap
    elif tokens is not None and members is not None:
        weights = [sum(tokens[row] for row in rows) for rows in members]
    blocks: list[list[Block]] = [[] for _ in range(dp_size)]
    stop, first_extra = 0, 0  # dp rank that gets the next extra row: over all blocks, sizes differ by one at most
    for number in range(num_blocks):
        start, stop = stop, stop + count // num_blocks + (number < count % num_blocks)
        parts = _next_runs(start, stop, dp_size, uneven, first_extra)
        if weights and not are_balanced([sum(map(weights.__getitem__, chain(*part))) for part in parts]):
            parts = _balanced(weights, start, stop, dp_size, uneven, first_extra)
        for dp, (real, filler) in enumerate(parts):
            blocks[dp].append(_block(real, filler, members))
        first_extra = (first_extra + stop - start) % dp_size if uneven == "ragged" else 0
    return tuple(Shard(tuple(each)) for each in blocks)


def rows_of_groups(groups: Sequence[int]) -> dict[int, list[int]]:
    """By group its rows, groups in the order of their first rows."""
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    return members


Run = tuple[int, int, int]  # rows start..stop-1 of a part: (part, start, stop)


def runs_of(shards: Sequence[Shard], per_input: int) -> tuple[Run, ...]:
    """Where the driver's rows lie in the answers of the dp ranks, in the driver's order, without those of filler."""
    places = []
    for part, shard in enumerate(shards):
        at = 0
        for block in shard.blocks:
            for start, stop in block.rows:
                places.append((start, part, at * per_input, (at + stop - start) * per_input))
                at += stop - start
            at += block.num_filler
    return tuple((part, start, stop) for _, part, start, stop in sorted(places) if stop > start)


def are_in_order(shards: Sequence[Shard]) -> bool:
    """The shards' rows, one shard after another, are the driver's rows in order, and there is no filler."""
    return len(_joined(run for shard in shards for run in shard.ranges())) <= 1 and not any(
        shard.has_filler for shard in shards
    )


def located(runs: Sequence[Run], ranges: Sequence[Range]) -> tuple[Run, ...]:
    """The runs that hold rows start..stop-1 of each range, in the order of the ranges.

    Args:
        runs: one after another they are the rows that ranges count.
    """
    edges = [0, *accumulate(stop - start for _, start, stop in runs)]
    places: list[Run] = []
    for low, high in ranges:
        at = bisect_right(edges, low) - 1
        while low < high:
            part, start, _ = runs[at]
            until = min(high, edges[at + 1])
            places.append((part, start + low - edges[at], start + until - edges[at]))
            low, at = until, at + 1
    return tuple(places)


def _next_runs(
    start: int, stop: int, dp_size: int, uneven: Uneven, first_extra: int
) -> list[tuple[Sequence[int], Sequence[int]]]:
    """(real, filler) of each dp rank: rows start..stop-1 of one block, in order."""
    size = stop - start
    length, extra = -(-size // dp_size) if uneven == "pad" else size // dp_size, size % dp_size
    parts: list[tuple[Sequence[int], Sequence[int]]] = []
    for dp in range(dp_size):
        end = start + length + (uneven == "ragged" and (dp - first_extra) % dp_size < extra)
        real = range(start, min(end, stop))
        parts.append((real, [max(real.stop - 1, 0)] * (end - real.stop)))
        start = real.stop
    return parts


def _balanced(
    weights: Sequence[int], start: int, stop: int, dp_size: int, uneven: Uneven, first_extra: int
) -> list[tuple[Sequence[int], Sequence[int]]]:
    """The same by weight. Filler is copies of the lightest row."""
    of_block = weights[start:stop]
    size, lightest = len(of_block), min(range(len(of_block)), key=of_block.__getitem__)
    padding = [of_block[lightest]] * (-size % dp_size) if uneven == "pad" else []
    parts = balanced_parts([*of_block, *padding], dp_size)
    parts.sort(key=len, reverse=True)  # the first get a row more
    shares: list[tuple[Sequence[int], Sequence[int]]] = []
    for dp in range(dp_size):
        places = parts[(dp - first_extra) % dp_size]
        real = sorted(start + place for place in places if place < size)
        shares.append((real, [start + lightest] * (len(places) - len(real))))
    return shares


def _block(real: Sequence[int], filler: Sequence[int], members: list[list[int]] | None) -> Block:
    if members is not None:
        rows = _joined((row, row + 1) for group in real for row in members[group])
        return Block(tuple(rows), tuple(tuple(_joined((row, row + 1) for row in members[group])) for group in filler))
    runs = [(real.start, real.stop)] if isinstance(real, range) else _joined((row, row + 1) for row in real)
    return Block(tuple(run for run in runs if run[1] > run[0]), tuple(((row, row + 1),) for row in filler))


def _joined(ranges: Iterable[Range]) -> list[Range]:
    """The same rows in as few ranges as possible."""
    joined: list[Range] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        elif stop > start:
            joined.append((start, stop))
    return joined


def _does_not_divide(
    count: int, noun: str, dp_size: int, num_blocks: int, least: int, where: str, uneven: Uneven
) -> Refused:
    blocks = f" x {num_blocks} mini-batches" if num_blocks != 1 else ""
    over = f"over dp size {dp_size}{blocks}"
    if uneven != "error":
        return Refused(
            f"a batch of {count} {noun} is too small to be dealt {over}",
            have=f"{count} {noun}",
            want=f"at least {least}",
            where=where,
            mend=f"give more {noun}, or cut fewer mini-batches",
        )
    unit = dp_size * num_blocks
    low = count // unit * unit
    return Refused(
        f"a batch of {count} {noun} cannot be dealt evenly {over}",
        have=f"{count} {noun}",
        want="one of the nearest legal sizes: " + ", ".join(str(size) for size in (low, low + unit) if size),
        where=where,
        mend=f"make the number of {noun} a multiple of {unit}",
    )
