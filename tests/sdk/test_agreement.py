"""What one rank finds, all ranks get."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from core.errors import Refused
from manymesh.parts.agreement import agree, on_every_rank, on_first_rank
from sdk.testing import Worlds


def test_the_first_ranks_answer_or_refusal_is_everybodys_and_no_other_rank_runs(on: Worlds) -> None:
    def job(rank: int, world_size: int) -> tuple[int, str]:
        def refuse() -> None:
            raise Refused("no", have=rank)

        answer = on_first_rank(dist.group.WORLD, lambda: 10 + rank)
        with pytest.raises(Refused, match="no") as refusal:
            on_first_rank(dist.group.WORLD, refuse)
        return answer, str(refusal.value)

    assert on(2, job) == [(10, "no\n  have: 0")] * 2


def test_the_error_of_the_lowest_rank_that_has_one_is_raised_on_all(on: Worlds) -> None:
    def job(rank: int, world_size: int) -> int:
        agree(dist.group.WORLD, None)
        with pytest.raises(Refused) as refusal:
            agree(dist.group.WORLD, Refused("full", have=rank) if rank > 0 else None)
        have: Any = refusal.value.have
        return int(have)

    assert on(4, job) == [1, 1, 1, 1]


def test_every_rank_keeps_its_own_answer_and_what_one_refuses_all_refuse(on: Worlds) -> None:
    def job(rank: int, world_size: int) -> tuple[int, str]:
        def refuse() -> None:
            if rank:
                raise Refused("no", have=rank)

        with pytest.raises(Refused, match="no") as refusal:
            on_every_rank(dist.group.WORLD, refuse)
        return on_every_rank(dist.group.WORLD, lambda: 10 + rank), str(refusal.value)

    assert on(2, job) == [(10, "no\n  have: 1"), (11, "no\n  have: 1")]
