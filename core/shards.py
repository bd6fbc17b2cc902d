"""Dealing the rows of a batch to dp ranks, block by block. Pure arithmetic, and the filler that makes sizes even."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.calls import Uneven
from core.errors import Refused
from core.worker import Shard

if TYPE_CHECKING:
    from core.rows import Rows


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


def cut(rows: Rows, shard: Shard, with_weights: bool) -> Rows:
    """The shard's rows. Filler is copies of real rows with `row_weight` 0.

    Args:
        with_weights: add the column `row_weight`: where any shard has filler all shards need it.
    """
    if not with_weights:
        return rows.take([(start, stop) for start, stop, _ in shard.blocks])
    import torch

    from core.rows import Rows

    index: list[int] = []
    for start, stop, filler in shard.blocks:
        index += [*range(start, stop), *[max(stop - 1, 0)] * filler]
    out = rows.select(torch.tensor(index))
    weight = out.columns.get("row_weight", torch.ones(len(index)))
    real = torch.tensor(shard.row_numbers()) >= 0
    return Rows(out.num, {**out.columns, "row_weight": weight * real}, out.offsets)


def in_order(rows: Rows, shards: tuple[Shard, ...], per_input: int) -> Rows:
    """Joined answers in the order of the driver's rows, without those of filler."""
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
