"""Dealing the rows of a batch to dp ranks, block by block. Pure arithmetic, and the filler that makes sizes even."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal

import attrs

from core.errors import Refused

Uneven = Literal["error", "pad", "ragged"]


@attrs.frozen
class Shard:
    """Which rows of the driver's batch a call brought to this rank.

    Attributes:
        blocks: from each block (mini-batch) of the batch one run of rows: (first, behind the last, filler rows after
            them). Numbers are those of the driver's batch.
    """

    blocks: tuple[tuple[int, int, int], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each block, filler included."""
        return tuple(stop - start + filler for start, stop, filler in self.blocks)

    def row_numbers(self) -> list[int]:
        """The driver's number of each row of the shard, -1 for filler."""
        return [row for start, stop, filler in self.blocks for row in (*range(start, stop), *[-1] * filler)]


def deal_rows(num_rows: int, dp_size: int, num_blocks: int, where: str, uneven: Uneven = "error") -> tuple[Shard, ...]:
    """The shard of each dp rank: from every block (mini-batch) a run of rows, in order.

    Args:
        uneven: what to do where rows don't divide. "error": refuse. "pad": blocks as even as possible, each filled up
            with filler to a multiple of dp_size. "ragged": no filler; shards, and a block's runs, differ by at most
            one row.

    Raises:
        Refused: rows don't divide ("error"), or are too few for one in each run ("ragged") or block ("pad").
    """
    if num_blocks < 1:
        raise Refused("a batch is cut into at least one block", have=num_blocks, where=where)
    unit = dp_size * num_blocks
    least = {"error": unit, "ragged": unit, "pad": num_blocks}[uneven]
    if num_rows < least or (uneven == "error" and num_rows % unit):
        raise _does_not_divide(num_rows, dp_size, num_blocks, least, where, uneven)
    blocks: list[list[tuple[int, int, int]]] = [[] for _ in range(dp_size)]
    first, behind, lucky = 0, 0, 0  # `lucky`: who gets a row more next, so that in all nobody gets two more
    for block in range(num_blocks):
        size = num_rows // num_blocks + (block < num_rows % num_blocks)
        first, behind = behind, behind + size
        run, extra = -(-size // dp_size) if uneven == "pad" else size // dp_size, size % dp_size
        at = first
        for dp in range(dp_size):
            wanted = run + (uneven == "ragged" and (dp - lucky) % dp_size < extra)
            stop = min(at + wanted, behind)
            blocks[dp].append((at, stop, at + wanted - stop))
            at = stop
        lucky = (lucky + extra) % dp_size if uneven == "ragged" else 0
    return tuple(Shard(tuple(each)) for each in blocks)


def cut(rows: Any, shard: Shard, with_weights: bool) -> Any:
    """The shard's rows of Rows, or what it takes to fetch them of RemoteRows. Filler is copies of real rows with
    `row_weight` 0.

    Args:
        with_weights: add the column `row_weight`: where any shard has filler all shards need it.
    """
    remote = hasattr(rows, "piece")
    if not with_weights:
        ranges = [(start, stop) for start, stop, _ in shard.blocks]
        return rows.piece(ranges) if remote else rows.take(ranges)
    real = [row >= 0 for row in shard.row_numbers()]
    if remote:
        ranges = []
        for start, stop, filler in shard.blocks:
            ranges += [(start, stop), *[(max(stop - 1, 0), max(stop, 1))] * filler]
        return rows.piece(ranges, real)
    import torch

    index: list[int] = []
    for start, stop, filler in shard.blocks:
        index += [*range(start, stop), *[max(stop - 1, 0)] * filler]
    return rows.select(torch.tensor(index)).weighted(torch.tensor(real))


Run = tuple[int, int, int]  # rows start..stop-1 of a part: (part, start, stop)


def runs_of(shards: Sequence[Shard], per_input: int) -> tuple[Run, ...]:
    """Where the driver's rows lie in the answers of the dp ranks, in the driver's order, without those of filler."""
    found = []
    for part, shard in enumerate(shards):
        at = 0
        for start, stop, filler in shard.blocks:
            found.append((start, part, at * per_input, (at + stop - start) * per_input))
            at += stop - start + filler
    return tuple((part, first, behind) for _, part, first, behind in sorted(found) if behind > first)


def located(runs: Sequence[Run], ranges: Sequence[tuple[int, int]]) -> tuple[Run, ...]:
    """The runs that hold rows start..stop-1 of each range, in the order of the ranges.

    Args:
        runs: one after another they are the rows that ranges count.
    """
    edges = [0, *accumulate(stop - start for _, start, stop in runs)]
    found: list[Run] = []
    for low, high in ranges:
        at = bisect_right(edges, low) - 1
        while low < high:
            part, start, _ = runs[at]
            until = min(high, edges[at + 1])
            found.append((part, start + low - edges[at], start + until - edges[at]))
            low, at = until, at + 1
    return tuple(found)


def in_order(rows: Any, shards: tuple[Shard, ...], per_input: int) -> Any:
    """Joined answers (Rows, or RemoteRows) in the order of the driver's rows, without those of filler."""
    if hasattr(rows, "in_order"):
        return rows.in_order(shards, per_input)
    if all(len(shard.blocks) == 1 and not shard.blocks[0][2] for shard in shards):
        return rows  # one run each, so the shards one after another are in order
    import torch

    order = torch.tensor([row for shard in shards for row in shard.row_numbers()])
    back = torch.argsort(order, stable=True)[int((order < 0).sum()) :]
    if torch.equal(back, torch.arange(len(order))):
        return rows
    return rows.select((back[:, None] * per_input + torch.arange(per_input)).reshape(-1))


def _does_not_divide(num_rows: int, dp_size: int, num_blocks: int, least: int, where: str, uneven: Uneven) -> Refused:
    blocks = f" x {num_blocks} mini-batches" if num_blocks != 1 else ""
    over = f"over dp size {dp_size}{blocks}"
    if uneven != "error":
        return Refused(
            f"a batch of {num_rows} rows is too small to be dealt {over}",
            have=f"{num_rows} rows",
            want=f"at least {least}",
            where=where,
            mend="give more rows, or cut fewer mini-batches",
        )
    unit = dp_size * num_blocks
    low = num_rows // unit * unit
    return Refused(
        f"a batch of {num_rows} rows cannot be dealt evenly {over}",
        have=f"{num_rows} rows",
        want="one of the nearest legal sizes: " + ", ".join(str(size) for size in (low, low + unit) if size),
        where=where,
        mend=f"make the number of rows a multiple of {unit}",
    )
