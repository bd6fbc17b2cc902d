"""Requests to servers from the driver, with a server that counts: its nth token is the prompt's last plus n."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from core.errors import ManymeshError, Refused, WorkerFailed
from core.group import RayClassWithInitArgs, WorkerGroup
from core.manifest import Capability
from core.mesh import MeshLayout, RankMesh
from core.registry import EngineRegistry
from core.rollout import GenerationDelta, SamplingParams
from core.transport.local import LocalWorkerGroup
from manymesh.workers import RolloutClient, RolloutServerWorker, RolloutWorkerConfig
from manymesh.workers.client import RequestFailed

TEN = SamplingParams(max_new_tokens=10)


class Counter:
    """A server. Prompts that begin with 13 fail at their third token, those with 666 are refused."""

    def __init__(self) -> None:
        layout = MeshLayout.of(dp=1)
        self.mesh = RankMesh(layout, 0, layout.route(("dp",), {}))
        self.weight_version = 0
        self.running: set[str] = set()
        self.doomed: set[str] = set()
        self.open = True
        self.healthy = True

    def initialize(self) -> None: ...
    def shutdown(self) -> None: ...

    def submit(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, *, request_id: str, prompt_id: int, sample: int
    ) -> AsyncIterator[GenerationDelta]:
        if prompt_ids[0] == 666:
            raise Refused("no")

        async def count() -> AsyncIterator[GenerationDelta]:
            self.running.add(request_id)
            for number in range(sampling.max_new_tokens):
                while not self.open and request_id not in self.doomed:
                    await asyncio.sleep(0.001)
                if request_id in self.doomed:
                    yield GenerationDelta(request_id, (), (), self.weight_version, "abort")
                    break
                if prompt_ids[0] == 13 and number == 2:
                    raise ValueError("unlucky")
                last = number + 1 == sampling.max_new_tokens
                token = prompt_ids[-1] + number + 1
                yield GenerationDelta(request_id, (token,), (-1.0,), self.weight_version, "length" if last else None)
            self.running.discard(request_id)

        return count()

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        self.doomed |= self.running if request_ids is None else set(request_ids)

    async def pause(self, mode: str) -> None:
        self.open = False
        if mode == "abort":
            await self.abort()

    async def resume_generation(self) -> None:
        self.open = True

    async def check_health(self) -> None:
        if not self.healthy:
            raise ManymeshError("its engine has died")


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> list[Counter]:
    workers: list[Counter] = []
    serves = SimpleNamespace(manifest=SimpleNamespace(capabilities={Capability.SERVER}))
    monkeypatch.setattr(EngineRegistry, "get", lambda *args, **kwargs: serves)

    def new(*args: Any, **kwargs: Any) -> Counter:
        workers.append(Counter())
        return workers[-1]

    monkeypatch.setattr(EngineRegistry, "new", new)
    return workers


@pytest.fixture
def groups(counters: list[Counter]) -> Iterator[list[WorkerGroup]]:
    worker = RayClassWithInitArgs(RolloutServerWorker, RolloutWorkerConfig("counter"))
    workers: list[Any] = [LocalWorkerGroup(worker, name=name) for name in "ab"]
    for group in workers:
        group.init_model()
    yield workers
    for group in workers:
        group.shutdown()


@pytest.fixture
def client(groups: list[WorkerGroup]) -> RolloutClient:
    return RolloutClient(groups, timeout_s=10)


def test_rows_come_in_the_order_of_their_prompts_from_all_replicas(client: RolloutClient) -> None:
    streams = client.submit_all([[100], [200], [300]], attrs.evolve(TEN, num_samples=2))
    assert [stream.replica.name for stream in streams] == [f"rank 0 of group {name!r}" for name in "ababab"]
    rows = [stream.result() for stream in reversed(streams)][::-1]
    assert [row.token_ids[0] for row in rows] == [101, 101, 201, 201, 301, 301]
    assert [(row.request.prompt_id, row.request.sample) for row in rows] == [(p, s) for p in range(3) for s in (0, 1)]
    assert all(row.token_ids == list(range(row.token_ids[0], row.token_ids[0] + 10)) for row in rows)
    assert all((row.log_probs, row.finish_reason) == ([-1.0] * 10, "length") for row in rows)
    assert set(client.loads.values()) == {0}


def test_a_request_goes_where_fewest_tokens_are_to_come(client: RolloutClient) -> None:
    client.pause("keep")
    long = client.submit([1] * 5, attrs.evolve(TEN, max_new_tokens=100))
    short = [client.submit([1], TEN) for _ in range(9)]
    assert {stream.replica.name for stream in short} == {"rank 0 of group 'b'"}
    assert sorted(client.loads.values()) == [9 * 11, 105]
    assert client.submit([1], TEN).replica is not long.replica
    assert client.submit([1], TEN).replica is long.replica
    client.resume_generation()
    next(iter(long))
    assert long.result().token_ids[-1] == 101


def test_versions_are_counted_as_the_deltas_come(client: RolloutClient, counters: list[Counter]) -> None:
    client.pause("keep")
    stream = client.submit([1], TEN)
    counters[0].weight_version = 7
    client.resume_generation()
    assert stream.result().weight_versions == [(7, 10)]
    assert list(stream) == []


def test_aborted_requests_keep_what_came_and_others_go_on(client: RolloutClient) -> None:
    client.pause("keep")
    one, other, third = client.submit([1], TEN), client.submit([2], TEN), client.submit([3], TEN)
    one.abort()
    assert (one.result().finish_reason, one.token_ids) == ("abort", [])
    client.resume_generation()
    assert [each.result().finish_reason for each in (other, third)] == ["length"] * 2
    client.pause("abort")
    client.resume_generation()
    with pytest.raises(Refused, match="no such replica"):
        client.alive[0].abort_requests(2)


def test_a_refused_request_leaves_none_of_its_call_running(client: RolloutClient, counters: list[Counter]) -> None:
    client.pause("keep")
    with pytest.raises(Refused, match="no"):
        client.submit_all([[1], [666]], TEN)
    assert set(client.loads.values()) == {0}
    assert len(counters[0].doomed) == 1


def test_a_request_that_its_replica_gives_up_fails_alone(client: RolloutClient) -> None:
    unlucky, other = client.submit([13], TEN), client.submit([1], TEN)
    for _ in range(2):
        with pytest.raises(RequestFailed, match="ValueError: unlucky"):
            unlucky.result()
    assert unlucky.token_ids == [14, 15]
    assert other.result().finish_reason == "length"
    assert set(client.loads.values()) == {0}


def test_what_two_clients_ask_comes_to_each_its_own(client: RolloutClient, groups: list[WorkerGroup]) -> None:
    second = RolloutClient(groups, timeout_s=10)
    streams = [client.submit([1], TEN), second.submit([2], TEN)]
    assert [stream.result().token_ids[0] for stream in reversed(streams)] == [3, 2]


def test_a_wait_has_a_deadline_and_says_what_for(groups: list[WorkerGroup]) -> None:
    client = RolloutClient(groups, timeout_s=0.1)
    client.pause("keep")
    stream = client.submit([1], TEN)
    with pytest.raises(TimeoutError, match=rf"{stream.request.id}[\s\S]*group 'a'[\s\S]*paused"):
        stream.result()


def test_requests_of_a_dead_replica_fail_by_name_and_new_ones_go_to_the_others(
    client: RolloutClient, counters: list[Counter]
) -> None:
    client.pause("keep")
    first, other = client.submit([1], TEN), client.submit([2], TEN)
    counters[0].healthy = False
    assert client.check_health() == ["rank 0 of group 'a'"]
    with pytest.raises(RequestFailed, match=rf"{first.request.id}[\s\S]*its engine has died") as raised:
        first.result()
    assert isinstance(raised.value.__cause__, WorkerFailed)
    client.resume_generation()
    assert [each.result().replica.name for each in (other, client.submit([3], TEN))] == ["rank 0 of group 'b'"] * 2
    counters[1].healthy = False
    client.check_health()
    with pytest.raises(RequestFailed, match="no replica lives"):
        client.submit([3], TEN)


def test_a_rollout_that_doesnt_serve_is_refused() -> None:
    worker = RayClassWithInitArgs(RolloutServerWorker, RolloutWorkerConfig("hf", {"model": "x"}))
    group: Any = LocalWorkerGroup(worker)
    with pytest.raises(Refused, match="'hf' doesn't serve"):
        group.init_model()
    with pytest.raises(Refused, match="init_model first"):
        group.resume_generation()
    group.shutdown()
