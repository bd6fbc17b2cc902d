"""The planner of micro-batches: cuts a rank's rows within a budget, longest first. Pure Python.

A plan is lists of row indices, by which results find back to their rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from core.errors import ConfigError


@attrs.frozen
class MicroBatchConfig:
    """Budget of one micro-batch. A row that is longer than max_tokens runs alone.

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


def plan_micro_batches(
    lengths: Sequence[int], config: MicroBatchConfig, *, packed: bool = False, sequence_multiple: int = 1
) -> list[list[int]]:
    """Cut rows into micro-batches.

    Rows are taken longest first, so that rows of like length meet and little is padded, and so that the first
    micro-batch needs the most memory: what doesn't fit fails early.

    Args:
        lengths: tokens of each row.
        packed: a micro-batch costs its tokens; else rows x the longest row's padded width.
        sequence_multiple: padded widths are multiples of it.

    Returns:
        row indices of each micro-batch; every row in exactly one.
    """
    plan: list[list[int]] = []
    tokens = 0  # of the open micro-batch
    widest = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        width = -(-lengths[row] // sequence_multiple) * sequence_multiple
        size = len(plan[-1]) + 1 if plan else 1
        cost = tokens + width if packed else widest * size
        full = (config.max_rows is not None and size > config.max_rows) or (
            config.max_tokens is not None and cost > config.max_tokens
        )
        if full or not plan:
            plan.append([])
            tokens, widest = 0, width
        plan[-1].append(row)
        tokens += width
    return plan


def widen(plan: Sequence[Sequence[int]], lengths: Sequence[int], count: int) -> list[list[int]]:
    """Cut further until there are `count` micro-batches: all ranks run the same number, or a collective would hang.

    Where there are fewer rows than that, the last micro-batches are empty: the caller fills them with rows of weight
    zero.
    """
    parts = [list(part) for part in plan]
    while len(parts) < count:
        heaviest = max(
            range(len(parts)), key=lambda i: (len(parts[i]) > 1, sum(lengths[row] for row in parts[i])), default=None
        )
        if heaviest is None or len(parts[heaviest]) < 2:
            parts.append([])
            continue
        part = parts[heaviest]
        parts[heaviest : heaviest + 1] = [part[: len(part) // 2], part[len(part) // 2 :]]
    return parts


def round_up(count: int, multiple: int) -> int:
    """The number of micro-batches, as a multiple that the engine asks for."""
    return -(-count // multiple) * multiple
