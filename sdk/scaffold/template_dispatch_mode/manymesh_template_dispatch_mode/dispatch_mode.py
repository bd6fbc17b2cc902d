"""The mode: `dispatch` makes one RankCall a rank from a Call, `collect` makes the caller's result from the answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase

from core.batch import concat, select
from core.dispatch import Call, DispatchMode, PerRank, RankCall
from core.errors import Refused


def dispatch(call: Call) -> list[RankCall | None]:
    """Batches are dealt by row, a PerRank gives each rank its own value, everything else goes to all. A rank for which
    no row is left does not run.

    Raises:
        Refused: batches of different length.
    """
    values = [*call.arguments.args, *call.arguments.kwargs.values()]
    lengths = {len(value) for value in values if isinstance(value, TensorDictBase)}
    if len(lengths) > 1:
        raise Refused("the batches of a call have the same number of rows", have=sorted(lengths), where=call.where)
    num_running = call.world_size if not lengths else min(call.world_size, *lengths)

    def own(value: Any, rank: int) -> Any:
        if isinstance(value, TensorDictBase):
            return select(value, torch.arange(rank, len(value), call.world_size))
        return value.of(rank, call.world_size, call.where) if isinstance(value, PerRank) else value

    def of_rank(rank: int) -> RankCall:
        args = tuple(own(value, rank) for value in call.arguments.args)
        return RankCall(args, {name: own(value, rank) for name, value in call.arguments.kwargs.items()})

    return [of_rank(rank) if rank < num_running else None for rank in range(call.world_size)]


def collect(call: Call, answers: Mapping[int, Any]) -> Any:
    """Batches become one batch, in the caller's order; other answers a list by rank."""
    ranks = sorted(answers)
    batches = [answers[rank] for rank in ranks]
    if not all(isinstance(batch, TensorDictBase) for batch in batches):
        return batches
    rows = [rank + call.world_size * number for rank in ranks for number in range(len(answers[rank]))]
    return select(concat(batches), torch.argsort(torch.tensor(rows)))


MODE = DispatchMode("template-dispatch-mode", dispatch, collect)
