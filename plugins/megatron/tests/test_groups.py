"""The planner's layouts are the process groups that megatron-core makes, and it refuses what megatron-core refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from core.errors import Refused
from manymesh_megatron.config import MegatronConfig
from manymesh_megatron.plan import MegatronPlan, plan

Sizes = dict[str, Any]
NAMES = {
    "tensor_parallel": "tensor_model_parallel_size",
    "pipeline_parallel": "pipeline_model_parallel_size",
    "context_parallel": "context_parallel_size",
    "expert_parallel": "expert_model_parallel_size",
    "expert_tensor_parallel": "expert_tensor_parallel_size",
    "order": "order",
}
OTHER_ORDERS = ("tp-cp-ep-pp-dp", "tp-pp-cp-ep-dp", "dp-tp-ep-cp-pp", "tp-dp-pp")


def sizes(tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, etp: int | None = None, **order: str) -> Sizes:
    return dict(zip(NAMES, (tp, pp, cp, ep, etp), strict=False)) | order


def planned(world_size: int, options: Sizes) -> MegatronPlan:
    return plan(MegatronConfig("model", **options), world_size)


def ask_megatron(cases: list[tuple[int, list[int], Sizes]]) -> list[list[Any]]:
    questions = [(world, ranks, {NAMES[name]: value for name, value in each.items()}) for world, ranks, each in cases]
    script = Path(__file__).with_name("groups_of_ranks.py")
    process = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps(questions),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    answers: list[list[Any]] = json.loads(process.stdout)
    return answers


CASES = [
    (2, sizes(tp=2)),
    (2, sizes(ep=2)),
    (4, sizes(tp=2, pp=2)),
    (4, sizes(cp=2, ep=2)),
    (8, sizes(tp=2, cp=2)),
    (8, sizes(tp=2, ep=4, etp=1)),
    (8, sizes(tp=2, pp=2, ep=2, etp=1)),
    (16, sizes(tp=2, pp=2)),
    (16, sizes(tp=2, pp=2, cp=2)),
    (16, sizes(tp=2, ep=4)),
    (16, sizes(tp=2, pp=2, ep=4, etp=1)),
    (16, sizes(tp=4, pp=2, cp=2, ep=2, etp=2)),
    (16, sizes(tp=1, etp=4, ep=2)),
    (16, sizes(tp=2, pp=2, order="tp-cp-ep-pp-dp")),
    (16, sizes(tp=2, pp=2, cp=2, ep=2, order="tp-cp-ep-pp-dp")),
    (16, sizes(tp=2, pp=2, cp=2, ep=2, order="dp-tp-ep-cp-pp")),
    (16, sizes(tp=4, pp=2, order="tp-dp-pp")),
    (16, sizes(tp=2, pp=2, cp=2, ep=4, etp=1, order="ep-tp-dp-cp-pp")),
]
ONE_RANK = [
    (8, sizes(tp, pp, cp, ep, etp, order=order))
    for tp, pp, cp, ep, etp in product((1, 2, 4), (1, 2), (1, 2, 3), (1, 2, 4), (None, 1, 4))
    for order in ("tp-cp-ep-dp-pp", *OTHER_ORDERS)
]


@pytest.fixture(scope="module")
def answers() -> list[list[Any]]:
    every = [(world, list(range(world)), each) for world, each in CASES]
    return ask_megatron([*every, *((world, [0], each) for world, each in ONE_RANK)])


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda i: f"{CASES[i][0]} ranks {CASES[i][1]}")
def test_every_rank_has_megatrons_groups(answers: list[list[Any]], number: int) -> None:
    world_size, options = CASES[number]
    layout_plan = planned(world_size, options)
    for rank, groups in enumerate(answers[number]):
        for axes, ranks in groups.items():
            layout = layout_plan.views["expert"] if axes.startswith("e") else layout_plan.layout
            assert list(layout.group_of(rank, *axes.split())) == ranks, (rank, axes)
        assert groups["dp"].index(rank) == layout_plan.route.dp_ranks[rank]


def test_what_megatron_refuses_is_refused_and_nothing_else(answers: list[list[Any]]) -> None:
    differing = []
    for (world_size, options), (answer,) in zip(ONE_RANK, answers[len(CASES) :], strict=True):
        try:
            planned(world_size, options)
            refused = False
        except Refused:
            refused = True
        if refused != isinstance(answer, str):
            differing.append((options, answer))
    assert differing == []
    assert {isinstance(answer, str) for (answer,) in answers[len(CASES) :]} == {True, False}
