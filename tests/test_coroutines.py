"""Coroutine methods of workers: calls begin in order and then overlap; other methods go on meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from core.dispatch import on_mesh, register
from core.errors import BadAnswer, Refused, WorkerFailed
from core.group import RayClassWithInitArgs, WorkerGroup
from core.transport.local import LocalWorkerGroup
from core.worker import Worker
from tests.support.workers import mesh_of


class Waiting(Worker):
    def __init__(self) -> None:
        self.add_mesh("m", mesh_of(self.rank, [0, 1], [0, 1]))
        self.log: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}

    @register()
    async def wait_at(self, name: str) -> str:
        self.log.append(f"{name} begins")
        await self.gates.setdefault(name, asyncio.Event()).wait()
        self.log.append(f"{name} ends")
        return name

    @register()
    async def open_gate(self, name: str) -> None:
        self.gates.setdefault(name, asyncio.Event()).set()

    @register()
    def seen(self) -> list[str]:
        return self.log

    @register(on_mesh("m"))
    async def doubled(self, batch: Any) -> Any:
        await asyncio.sleep(0)
        batch["x"].mul_(2)
        batch["row"] = torch.tensor(self.shard.row_numbers())  # type: ignore[union-attr]
        return batch

    @register()
    async def misbehave(self, how: str) -> Any:
        await asyncio.sleep(0)
        if how == "refuse":
            raise Refused("a bad request")
        if how == "answer badly":
            return torch.eye(2).to_sparse()
        raise ValueError("a fault")


class Ordinary(Worker):
    @register()
    def run_loop(self) -> bool:
        """What a library does that has coroutines of its own; it may take signals, too."""
        asyncio.run(asyncio.sleep(0))
        return threading.current_thread() is threading.main_thread()


@pytest.fixture(scope="module")
def ray_group(ray_cluster: None) -> Iterator[WorkerGroup]:
    from core.transport.ray import RayResourcePool, RayWorkerGroup

    with RayResourcePool([2]) as pool, RayWorkerGroup(pool, RayClassWithInitArgs(Waiting)) as group:
        yield group


@pytest.fixture(params=["local", "ray"])
def group(request: pytest.FixtureRequest) -> WorkerGroup:
    if request.param == "ray":
        return request.getfixturevalue("ray_group")  # type: ignore[no-any-return]
    return LocalWorkerGroup(RayClassWithInitArgs(Waiting), world_size=2)


def test_calls_of_coroutine_methods_overlap_and_begin_in_the_order_in_which_they_were_made(
    ray_group: WorkerGroup,
) -> None:
    waiting = [ray_group.wait_at.later(name) for name in "abc"]
    assert ray_group.seen() == [["a begins", "b begins", "c begins"]] * 2  # an ordinary method goes on meanwhile
    assert not any(future.done() for future in waiting)
    for future, name in ((waiting[1], "b"), (waiting[2], "c"), (waiting[0], "a")):
        ray_group.open_gate(name)
        assert future.result() == [name] * 2
    assert ray_group.seen()[0][3:] == ["b ends", "c ends", "a ends"]


def test_rows_of_a_coroutine_method_are_dealt_joined_and_private_as_of_any_other(group: WorkerGroup) -> None:
    batch = TensorDict({"x": torch.arange(6)}, batch_size=[6])
    answers = [group.doubled(batch), group.doubled.later(batch).result()]
    for answer in answers:
        assert answer["x"].tolist() == [0, 2, 4, 6, 8, 10]
        assert answer["row"].tolist() == [0, 1, 2, 3, 4, 5]
    assert batch["x"].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_coroutine_method_fails_in_the_same_three_ways(group: WorkerGroup) -> None:
    with pytest.raises(Refused, match="a bad request"):
        group.misbehave("refuse")
    with pytest.raises(BadAnswer):
        group.misbehave("answer badly")
    assert not group.failed
    if isinstance(group, LocalWorkerGroup):
        with pytest.raises(WorkerFailed, match="a fault"):
            group.misbehave("raise")


def test_without_a_coroutine_method_a_worker_has_no_event_loop_and_its_methods_run_in_the_main_thread(
    ray_cluster: None,
) -> None:
    from core.transport.ray import RayResourcePool, RayWorkerGroup

    with RayResourcePool([1]) as pool, RayWorkerGroup(pool, RayClassWithInitArgs(Ordinary)) as group:
        assert group.run_loop() == [True]
