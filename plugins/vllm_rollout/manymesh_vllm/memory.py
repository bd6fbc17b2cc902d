"""Giving an engine's memory back and taking it again, by vLLM's sleep mode."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from core.rollout import MemoryTag
from manymesh.parts.weight_state import RESUME_ORDER


@attrs.frozen
class Step:
    """One call of vLLM: sleep at a level, or wake_up of tags.

    Attributes:
        level: 1 moves the weights to the host, 2 drops them; None: wake_up.
    """

    level: int | None = None
    tags: tuple[MemoryTag, ...] = ()


def sleep_steps(tags: Iterable[MemoryTag], released_tags: frozenset[MemoryTag]) -> Sequence[Step]:
    """How to free the memory of `tags`, which have it, where `released_tags` have none.

    vLLM puts all to sleep together, from being wide awake, and wakes tag by tag. So what sleeps is woken first, and
    what shall stay is woken again at once: weights come back from the host's memory.
    """
    asleep = released_tags | set(tags)
    steps = [Step(tags=_ordered(released_tags))] if released_tags else []
    steps.append(Step(level=2 if "weights" in asleep else 1))
    if stays := _ordered(set(RESUME_ORDER) - asleep):
        steps.append(Step(tags=stays))
    return steps


def _ordered(tags: Iterable[MemoryTag]) -> tuple[MemoryTag, ...]:
    return tuple(tag for tag in RESUME_ORDER if tag in set(tags))
