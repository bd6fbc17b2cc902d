"""Rows go from the workers of one group to those of another, not through the driver, and arrive as if they had."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from core._rows.shards import Uneven, deal_rows, located, runs_of
from core._rows.stored import StoredPart
from core._rows.wire import encode
from core.batch import jagged_from, object_column, objects, take
from core.errors import BadAnswer, Refused, WorkerFailed
from core.group import Future, RayClassWithInitArgs, WorkerGroup
from core.transport.local import LocalWorkerGroup
from tests.support.workers import Echo

WIDE = 200_000  # floats a row: two rows are above 1 MB, so the column is an object of its own


def batch_of(rows: int = 8) -> TensorDict:
    lengths = torch.tensor([i % 4 for i in range(rows)], dtype=torch.int64)
    tokens: Any = jagged_from(torch.arange(int(lengths.sum())), lengths)
    return TensorDict(
        {
            "x": torch.arange(rows),
            "names": object_column([f"row {i}" for i in range(rows)]),
            "tokens": tokens,
            "more": tokens * 2,
        },
        batch_size=[rows],
    )


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_plan_finds_every_row_where_the_first_group_left_it(data: st.DataObject) -> None:
    draw = data.draw
    uneven: Uneven = draw(st.sampled_from(["error", "pad", "ragged"]))
    dp_size, num_blocks, per_input = (draw(st.integers(1, 4)) for _ in range(3))
    rows = dp_size * num_blocks * draw(st.integers(1, 3)) + (draw(st.integers(0, 7)) if uneven != "error" else 0)
    shards = deal_rows(rows, dp_size, num_blocks, "a test", uneven)
    parts = [[(row, i) for row in shard.row_numbers() for i in range(per_input)] for shard in shards]
    runs = runs_of(shards, per_input)
    whole = [(row, i) for row in range(rows) for i in range(per_input)]
    assert [each for part, start, stop in runs for each in parts[part][start:stop]] == whole
    edges = st.tuples(st.integers(0, len(whole)), st.integers(0, len(whole))).map(lambda pair: (min(pair), max(pair)))
    ranges = draw(st.lists(edges, max_size=5))
    have = [each for part, start, stop in located(runs, ranges) for each in parts[part][start:stop]]
    assert have == [each for start, stop in ranges for each in whole[start:stop]]


@pytest.mark.parametrize("sizes", [[0, 0], [0, 3], [2, 0, 1]])
def test_parts_may_have_no_rows(sizes: list[int]) -> None:
    whole, store, parts, at = batch_of(sum(sizes)), [], [], 0
    for rank, size in enumerate(sizes):
        rows: Any = encode(take(whole, [(at, at + size)]))
        parts.append(StoredPart.of(rows, rank, lambda value: store.append(value) or len(store) - 1))  # type: ignore[func-returns-value]
        at += size

    class Source:
        @staticmethod
        def fetch(handles: Any) -> Any:
            return [store[handle] for handle in handles]

    batch = attrs.evolve(StoredPart.joined(parts), source=Source).batch()
    assert batch["x"].tolist() == list(range(sum(sizes)))
    assert objects(batch.get("names")) == objects(whole.get("names"))
    assert torch.equal(batch["tokens"].values(), whole["tokens"].values())


@pytest.fixture(scope="module")
def ray_groups(ray_cluster: None) -> Iterator[tuple[WorkerGroup, WorkerGroup]]:
    from core.transport.ray import RayResourcePool, RayWorkerGroup

    with (
        RayResourcePool([4]) as one,
        RayResourcePool([2]) as other,
        RayWorkerGroup(one, RayClassWithInitArgs(Echo, [1, 1, 2, 0], [0, 2, 3]), name="maker") as maker,
        RayWorkerGroup(other, RayClassWithInitArgs(Echo, [1, 0], [0, 1]), name="taker") as taker,
    ):
        yield maker, taker


@pytest.fixture(params=["local", "ray"])
def groups(request: pytest.FixtureRequest) -> tuple[WorkerGroup, WorkerGroup]:
    """A maker with dp 3 over four ranks, and a taker with dp 2, whose dp ranks are permuted."""
    if request.param == "ray":
        return request.getfixturevalue("ray_groups")  # type: ignore[no-any-return]
    maker = LocalWorkerGroup(RayClassWithInitArgs(Echo, [1, 1, 2, 0], [0, 2, 3]), world_size=4, name="maker")
    return maker, LocalWorkerGroup(RayClassWithInitArgs(Echo, [1, 0], [0, 1]), world_size=2, name="taker")


def same(a: TensorDict, b: TensorDict) -> bool:
    flat = all(torch.equal(a[name].values(), b[name].values()) for name in ("tokens", "more"))
    plain = all(torch.equal(a[name], b[name]) for name in ("x", "wide"))
    return flat and plain and objects(a.get("names")) == objects(b.get("names")) and set(a.keys()) == set(b.keys())


@pytest.mark.parametrize(
    ("rows", "num_blocks", "times", "width"),
    [(8, 1, 1, 4), (6, 2, 1, 4), (7, 2, 2, WIDE), (4, 1, 3, 100), (9, 3, 2, 30_000)],
)
@pytest.mark.parametrize("method", ["echo", "padded", "ragged"])
def test_rows_arrive_as_they_would_through_the_driver(
    groups: Any, rows: int, num_blocks: int, times: int, width: int, method: str
) -> None:
    maker, taker = groups
    batch = batch_of(rows)
    future = maker.make_later(batch, num_blocks, times, width)
    answer = getattr(taker, method)(future[0])
    through_driver = getattr(taker, method)(maker.make_later(batch, num_blocks, times, width).result()[0])
    assert answer["x"].tolist() == [row for row in range(rows) for _ in range(times)]
    assert same(answer, through_driver)
    assert torch.equal(answer["wide"], answer["x"].float()[:, None].expand(-1, width))
    assert (answer["tokens"] + answer["more"]).values().tolist() == (answer["tokens"].values() * 3).tolist()
    assert future[1]["sum"] == float(answer["x"].sum())
    assert sorted(future[2]) == [0, 2, 3]


def test_filler_reaches_a_rank_that_has_no_row_of_its_own_and_does_not_come_back(groups: Any) -> None:
    maker, taker = groups
    batch = batch_of(1).exclude("names")
    answer = taker.padded(maker.padded_later(batch))
    assert (answer["x"].tolist(), answer["got"].tolist()) == ([0], [1])
    assert "row_weight" not in answer.keys()  # noqa: SIM118
    assert taker.mean_of_x(maker.make_later(batch_of(5))[0])["mean"] == 2.0


def test_a_future_can_be_an_argument_of_any_mode_and_of_several_calls(groups: Any) -> None:
    maker, taker = groups
    future = maker.make_later(batch_of(6))[0]
    assert taker.whole(future) == [list(range(6))] * 2
    assert taker.second(batch_of(6), future)["x"].tolist() == list(range(6))
    assert taker.only_x(future).keys() == {"x"}
    assert future["wide"].shape == (6, 4)
    assert taker.echo(future)["x"].tolist() == future.result()["x"].tolist()


def test_a_worker_that_writes_to_what_it_was_handed_changes_it_for_nobody(groups: Any) -> None:
    maker, taker = groups
    future = maker.make_later(batch_of(6), width=WIDE)[0]
    assert taker.edit(future)["x"].tolist() == [0, 2, 4, 6, 8, 10]
    assert taker.echo(future)["x"].tolist() == list(range(6))


def test_the_error_of_the_first_call_surfaces_at_the_second_with_both_named() -> None:
    maker = LocalWorkerGroup(RayClassWithInitArgs(Echo), name="maker")
    taker = LocalWorkerGroup(RayClassWithInitArgs(Echo), name="taker")
    with pytest.raises(WorkerFailed) as failure:
        taker.echo(maker.make_later(batch_of(6).exclude("x")))
    assert all(word in str(failure.value) for word in ("'maker'", "'make_later'", "'taker'", "'echo'"))
    assert (failure.value.method, failure.value.group) == ("make_later", "maker")
    assert taker.num_calls() == [0]
    assert not taker.failed


class Meter:
    """What the driver puts into Ray's store and gets from it, bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import ray

        self.sizes: list[int] = []
        put, get = ray.put, ray.get

        def weighed_put(value: Any, *args: Any, **kwargs: Any) -> Any:
            self.sizes.append(self.weigh(value))
            return put(value, *args, **kwargs)

        def weighed_get(references: Any, *args: Any, **kwargs: Any) -> Any:
            values = get(references, *args, **kwargs)
            self.sizes.append(self.weigh(values))
            return values

        monkeypatch.setattr(ray, "put", weighed_put)
        monkeypatch.setattr(ray, "get", weighed_get)

    @staticmethod
    def weigh(value: Any) -> int:
        from core.transport.ray.pickles import _Pickler

        buffers: list[Any] = []
        stream = io.BytesIO()
        pickler = _Pickler(stream, protocol=5, buffer_callback=buffers.append)
        pickler.references = []
        pickler.dump(value)
        return len(stream.getvalue()) + sum(int(buffer.raw().nbytes) for buffer in buffers)


def test_no_payload_of_a_shard_above_100_kib_passes_through_the_driver(
    ray_groups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker, taker = ray_groups
    for width in (30_000, WIDE):  # shards of 240 kB in one object, and of 1.6 MB with a column by itself
        meter = Meter(monkeypatch)
        future = maker.make_later(batch_of(6), width=width)[0]
        assert taker.whole(future) == [list(range(6))] * 2
        assert sum(meter.sizes) < 60_000
    meter = Meter(monkeypatch)
    assert future["x"].tolist() == list(range(6))
    assert sum(meter.sizes) < 60_000
    assert future["wide"].shape == (6, WIDE)
    assert sum(meter.sizes) > 6 * WIDE * 4


def test_rows_for_another_node_are_cut_where_they_lie(ray_groups: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    maker, taker = ray_groups
    elsewhere = [attrs.evolve(identity, node_id="another") for identity in taker.identities]
    monkeypatch.setattr(taker._transport, "identities", elsewhere)
    cuts: list[Any] = []
    original = maker._transport.cut

    def noted(part: Any, ranges: Any, names: Any) -> Any:
        cuts.append(ranges)
        return original(part, ranges, names)

    monkeypatch.setattr(maker._transport, "cut", noted)
    future = maker.make_later(batch_of(9), 3, 1, WIDE)[0]  # three blocks over dp 3: parts hold rows 0 3 6, 1 4 7, 2 5 8
    answer = taker.ragged(future)
    assert answer["x"].tolist() == list(range(9))
    assert torch.equal(answer["wide"][:, -1], torch.arange(9.0))
    assert sorted(map(len, cuts)) == [1, 1, 1, 2, 2, 2]


def test_rows_are_gone_with_the_workers_that_made_them(ray_cluster: None, ray_groups: Any) -> None:
    maker, taker = ray_groups
    future = maker.make_later(batch_of(6))[0]
    future_of_ended_group = Future(
        None, None, attrs.evolve(future.settled(), source=type("Ended", (), {"ended": True})())
    )
    with pytest.raises(BadAnswer, match="its workers have been ended") as error:
        future_of_ended_group.result()
    assert "'make_later' of group 'maker'" in str(error.value)
    with pytest.raises(Refused, match="its workers have been ended"):
        taker.echo(future_of_ended_group)
