"""The planner of micro-batches: cuts a rank's rows within a budget, longest first. Pure Python.

A plan is lists of row indices, by which results find back to their rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from core.errors import ConfigError, Refused

Groups = Mapping[int, Sequence[int]]
"""By `group_id` the rows of each group, which stay together. None where every row stands alone."""


@attrs.frozen
class MicroBatchConfig:
    """Budget of one micro-batch. A row that is longer than max_tokens runs alone; a group of rows is refused.

    Attributes:
        max_rows: rows at most; None for no limit.
        max_tokens: tokens at most, padding included where the engine pads; None for no limit.
    """

    max_rows: int | None = None
    max_tokens: int | None = 16384

    def __attrs_post_init__(self) -> None:
        for name in ("max_rows", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is at least 1, or null for no limit", have=value)

    def holds(self, rows: int, tokens: int) -> bool:
        """Whether so much is within the budget."""
        return (self.max_rows is None or rows <= self.max_rows) and (
            self.max_tokens is None or tokens <= self.max_tokens
        )


def plan_micro_batches(
    lengths: Sequence[int],
    config: MicroBatchConfig,
    *,
    packed: bool = False,
    sequence_multiple: int = 1,
    groups: Groups | None = None,
) -> list[list[int]]:
    """Cut rows into micro-batches.

    Rows are taken longest first, so that rows of like length meet and little is padded, and so that the first
    micro-batch needs the most memory: what doesn't fit fails early. A group goes by its longest row.

    Args:
        lengths: tokens of each row.
        packed: a micro-batch costs its tokens; else rows x the longest row's padded width.
        sequence_multiple: padded widths are multiples of it.

    Returns:
        row indices of each micro-batch; every row in exactly one, rows of a group one after another.

    Raises:
        Refused: a group of several rows exceeds the budget.
    """
    plan: list[list[int]] = []
    tokens = 0  # of the open micro-batch
    widest = 0
    for rows in sorted(_units(len(lengths), groups), key=lambda rows: -max(lengths[row] for row in rows)):
        widths = [round_up(lengths[row], sequence_multiple) for row in rows]
        width, size = max(widths), len(plan[-1]) + len(rows) if plan else 0
        if not plan or not config.holds(size, tokens + sum(widths) if packed else widest * size):
            alone = sum(widths) if packed else width * len(rows)
            if len(rows) > 1 and not config.holds(len(rows), alone):
                raise _too_large(rows, alone, config, groups or {})
            plan.append([])
            tokens, widest = 0, width
        plan[-1] += rows
        tokens += sum(widths)
    return plan


def widen(
    plan: Sequence[Sequence[int]], lengths: Sequence[int], count: int, groups: Groups | None = None
) -> list[list[int]]:
    """Cut further until there are `count` micro-batches: all ranks run the same number, or a collective would hang.

    Where there are fewer rows (or groups) than that, the last micro-batches are empty: the caller fills them with rows
    of weight zero.
    """
    unit_of = {rows[0]: rows for rows in _units(len(lengths), groups)}  # by its first row
    parts = [[unit_of[row] for row in part if row in unit_of] for part in plan]
    tokens = [sum(lengths[row] for row in part) for part in plan]
    while len(parts) < count:
        heaviest = max(range(len(parts)), key=lambda i: (len(parts[i]) > 1, tokens[i]), default=None)
        if heaviest is None or len(parts[heaviest]) < 2:
            parts += [[] for _ in range(count - len(parts))]
            break
        part = parts[heaviest]
        halves = [part[: len(part) // 2], part[len(part) // 2 :]]
        parts[heaviest : heaviest + 1] = halves
        tokens[heaviest : heaviest + 1] = [sum(lengths[row] for rows in half for row in rows) for half in halves]
    return [[row for rows in part for row in rows] for part in parts]


def round_up(count: int, multiple: int) -> int:
    """The least multiple that is not below `count`."""
    return -(-count // multiple) * multiple


def _units(num_rows: int, groups: Groups | None) -> list[Sequence[int]]:
    """What is never cut: single rows, or groups."""
    return [[row] for row in range(num_rows)] if groups is None else list(groups.values())


def _too_large(rows: Sequence[int], tokens: int, config: MicroBatchConfig, groups: Groups) -> Refused:
    name = next(name for name, members in groups.items() if members is rows)
    return Refused(
        f"the rows of group {name} belong together and do not fit into one micro-batch",
        have=f"{len(rows)} rows, {tokens} tokens with padding",
        want=f"at most max_rows {config.max_rows}, max_tokens {config.max_tokens}",
        mend="raise the budget (micro_batch.max_rows, micro_batch.max_tokens), or make the group smaller",
    )
