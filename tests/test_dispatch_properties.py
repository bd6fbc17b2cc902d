"""Whatever the mesh, the policy and the columns: a batch that goes through a group comes back as it went.

A few hundred examples in the base suite; `-m slow` runs 10,000.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from core.batch import concat, flat, is_jagged, jagged_from, metadata, object_column, objects, with_metadata
from core.dispatch import Uneven, on_mesh, register
from core.errors import Refused
from core.group import RayClassWithInitArgs
from core.transport.local import LocalWorkerGroup
from core.worker import Worker
from tests.support.workers import mesh_of


class Giving(Worker):
    """Gives batches back in every way."""

    def __init__(self, dp_ranks: Any, collected: Any) -> None:
        self.add_mesh("m", mesh_of(self.rank, dp_ranks, collected))

    def _back(self, batch: Any, blocks: int) -> Any:
        assert self.shard is not None
        assert len(self.shard.sizes) == blocks
        batch["row"] = torch.tensor(self.shard.row_numbers())
        return batch


_register: Any = register  # policy and blocking are known only when it runs
for _policy in ("error", "pad", "ragged"):

    @_register(on_mesh("m"), blocking=_policy != "pad", uneven=_policy, num_blocks=lambda batch, blocks: blocks)
    def _method(self: Giving, batch: Any, blocks: int) -> Any:
        return self._back(batch, blocks)

    setattr(Giving, _policy, _method)

values = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.lists(st.integers(), max_size=2), st.floats())


@st.composite
def batches(draw: Any, rows: int) -> TensorDict:
    """Dense, jagged (also with empty rows, and of tokens with more dims), object and empty columns, and metadata."""
    table: dict[str, Any] = {}
    for i in range(draw(st.integers(1, 4))):
        seed = torch.Generator().manual_seed(draw(st.integers(0, 9)))
        match draw(st.sampled_from(["dense", "jagged", "deep", "object", "empty", "half", "inner"])):
            case "dense":
                table[f"c{i}"] = torch.rand(rows, draw(st.integers(1, 3)), generator=seed)
            case "half":
                table[f"c{i}"] = torch.rand(rows, generator=seed).bfloat16()
            case "empty":
                table[f"c{i}"] = torch.zeros(rows, 0)
            case "inner":
                table[f"c{i}"] = TensorDict({"flag": torch.rand(rows, generator=seed) < 0.5}, batch_size=[rows])
            case "object":
                table[f"c{i}"] = object_column(draw(st.lists(values, min_size=rows, max_size=rows)))
            case form:
                lengths = torch.tensor(draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows)))
                shape = (int(lengths.sum()), *[2] * (form == "deep"))
                table[f"c{i}"] = jagged_from(torch.rand(shape, generator=seed), lengths)
    return with_metadata(TensorDict(table, batch_size=[rows]), note=draw(values))


@st.composite
def calls(draw: Any) -> tuple[LocalWorkerGroup, TensorDict, Uneven, int]:
    dp_size = draw(st.integers(1, 4))
    width = draw(st.integers(1, 8 // dp_size))
    dp_ranks = draw(st.permutations([dp for dp in range(dp_size) for _ in range(width)]))
    collected = [draw(st.sampled_from([r for r, d in enumerate(dp_ranks) if d == dp])) for dp in range(dp_size)]
    group = LocalWorkerGroup(RayClassWithInitArgs(Giving, dp_ranks, collected), world_size=dp_size * width)
    rows, blocks = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    return group, draw(batches(rows)), draw(st.sampled_from(["error", "pad", "ragged"])), blocks


def same(a: Any, b: Any) -> bool:
    if set(a.keys()) != set(b.keys()) or len(a) != len(b):
        return False
    for name in b.keys():  # noqa: SIM118
        x: Any
        y: Any
        x, y = a.get(name), b.get(name)
        if name == "note":
            equal = repr(metadata(a, name)) == repr(metadata(b, name))
        elif isinstance(y, TensorDict):
            equal = same(x, y)
        elif not isinstance(y, torch.Tensor):
            equal = repr(objects(x)) == repr(objects(y))
        elif is_jagged(y):
            equal = torch.equal(x.values(), y.values()) and torch.equal(flat(x)[1], flat(y)[1])
        else:
            equal = x.dtype == y.dtype and torch.equal(x, y)
        if not equal:
            return False
    return True


def check(call: tuple[LocalWorkerGroup, TensorDict, Uneven, int]) -> None:
    group, batch, uneven, blocks = call
    before = concat([batch])
    dp_size = group.route("m").dp_size
    try:
        answer = getattr(group, uneven)(batch, blocks)
    except Refused:
        unit = dp_size * blocks
        legal = {"error": len(batch) % unit == 0, "pad": len(batch) >= blocks, "ragged": len(batch) >= unit}
        assert not legal[uneven]
        assert not group.failed
        return
    answer = answer.result() if uneven == "pad" else answer
    assert answer["row"].tolist() == list(range(len(batch)))
    assert same(answer.exclude("row"), before)
    assert same(batch, before)


QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]


@given(calls())
@settings(max_examples=200, deadline=None, suppress_health_check=QUIET)
def test_a_batch_comes_back_as_it_went(call: Any) -> None:
    check(call)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@given(calls())
@settings(max_examples=10_000, deadline=None, suppress_health_check=QUIET)
def test_ten_thousand_batches_come_back_as_they_went(call: Any) -> None:
    check(call)
