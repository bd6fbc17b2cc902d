"""Decisions that every rank takes alike: without them one rank refuses while the others wait in a collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from core.errors import Refused

T = TypeVar("T")


def on_first_rank(group: Any, function: Callable[[], T]) -> T:
    """Run `function` on rank 0 of the group and give its (picklable) answer to all.

    Raises:
        Refused: on all ranks, where the function raised it on the first.
    """
    answer: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            answer[0] = function()
        except Refused as error:
            answer[1] = error
    if dist.get_world_size(group) > 1:
        dist.broadcast_object_list(answer, group=group, group_src=0)
    if answer[1] is not None:
        raise answer[1]
    value: T = answer[0]
    return value


def agree(group: Any, error: Refused | None) -> None:
    """Raise on all ranks the error of the lowest rank that has one. A process without a world is alone."""
    errors: list[Refused | None] = [error]
    if dist.is_initialized() and (size := dist.get_world_size(group)) > 1:
        errors = [None] * size
        dist.all_gather_object(errors, error, group=group)
    for each in errors:
        if each is not None:
            raise each


def on_every_rank(group: Any, function: Callable[[], T]) -> T:
    """Run `function`, which must not be collective, on every rank, and give each rank its own answer.

    Raises:
        Refused: on all ranks, where the function raised it on any: that of the lowest one.
    """
    answers: list[T] = []
    error: Refused | None = None
    try:
        answers.append(function())
    except Refused as refusal:
        error = refusal
    agree(group, error)
    return answers[0]
