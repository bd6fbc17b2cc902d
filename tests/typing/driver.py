"""What type checkers know in a driver: checked by mypy, never run."""

from __future__ import annotations

from typing import Any, assert_type

from core import (
    Dispatch,
    Execute,
    Future,
    LocalWorkerGroup,
    Metric,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    WorkerGroup,
    create_colocated_worker_cls,
    on_mesh,
    register,
)


class Rows:
    """Stands for a batch."""


class Scorer(Worker):
    def __init__(self, config: int, name: str = "", *, deep: bool = False) -> None: ...

    @register()
    def ping(self, count: int = 1) -> int:
        return count

    @register(Dispatch.RANK_ZERO)
    def first(self) -> str:
        return ""

    @register(execute_mode=Execute.RANK_ZERO)
    def alone(self) -> str:
        return ""

    @register(Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def alone_too(self) -> str:
        return ""

    @register(Dispatch.SAME_ON_ALL)
    def version(self) -> int:
        assert_type(self.ping(), int)
        return self.ping(2)

    @register(Dispatch.ALL_TO_ALL)
    def own(self, value: int) -> int:
        return value

    @register(on_mesh("score"), columns=["input_ids"], reads_only=True)
    def score(self, batch: Rows, factor: float = 1.0) -> Rows | None:
        assert_type(self.score(batch), Rows | None)
        return batch

    @register(on_mesh("score"), num_blocks=2)
    def update(self, batch: Rows) -> dict[str, Metric]:
        return {}

    @register(on_mesh("score"))
    def infer(self, batch: Rows) -> tuple[Rows | None, dict[str, Metric]] | None:
        return None

    @register(on_mesh("score"))
    def store(self, batch: Rows) -> None: ...

    @register(on_mesh("score"), blocking=False)
    def slow(self, batch: Rows) -> Rows:
        return batch

    @register("a_plugin_s_mode")
    def named(self, batch: Rows) -> Rows:
        return batch


class Holder(Worker):
    """Calls the registered methods of an inner worker, which are what they were written as."""

    def __init__(self) -> None:
        self.inner = Scorer(3)

    @register()
    def ping(self) -> None:
        assert_type(self.inner.ping(), int)
        assert_type(self.inner.update(Rows()), dict[str, Metric])


def groups(pool: RayResourcePool) -> None:
    assert_type(RayWorkerGroup(pool, Scorer, 3, name="scorers"), RayWorkerGroup[Scorer])
    assert_type(RayWorkerGroup(pool, RayClassWithInitArgs(Scorer, 3, deep=True)), RayWorkerGroup[Scorer])
    with LocalWorkerGroup(Scorer, 3, world_size=2) as group:
        assert_type(group, LocalWorkerGroup[Scorer])
        assert_type(group.workers, type[Scorer])
        assert_type(group.world_size, int)


def calls(group: WorkerGroup[Scorer]) -> None:
    workers = group.workers
    assert_type(workers.ping(), list[int])
    assert_type(workers.ping(count=3), list[int])
    assert_type(workers.ping.later(3), Future[list[int]])
    assert_type(workers.first(), str)
    assert_type(workers.alone(), str)
    assert_type(workers.alone_too(), str)
    assert_type(workers.version(), int)
    assert_type(workers.own([1, 2]), list[int])
    assert_type(workers.score(Rows(), factor=2.0), Rows)
    assert_type(workers.score(batch=Rows()), Rows)
    assert_type(workers.update(Rows()), dict[str, float])
    assert_type(workers.infer(Rows()), tuple[Rows, dict[str, float]])
    assert_type(workers.infer.later(Rows()).result(), tuple[Rows, dict[str, float]])
    workers.store(Rows())
    assert_type(workers.slow(Rows()), Future[Any])
    assert_type(workers.named(Rows()), Any)


def roles(pool: RayResourcePool) -> None:
    group = RayWorkerGroup(pool, create_colocated_worker_cls({"scorer": RayClassWithInitArgs(Scorer, 3)}))
    assert_type(group, RayWorkerGroup[Any])
    assert_type(group.spawn()["scorer"].workers.ping(), Any)
    scorer: WorkerGroup[Scorer] = group.spawn()["scorer"]
    assert_type(scorer.workers.ping(), list[int])
    assert_type(scorer.ping(), Any)


def futures(group: WorkerGroup[Scorer]) -> None:
    scored = group.workers.score.later(Rows())
    assert_type(scored, Future[Rows])
    assert_type(scored.result(), Rows)
    assert_type(group.workers.score(scored), Rows)
    assert_type(group.workers.score(scored, factor=2.0), Rows)
    assert_type(group.workers.update.later(scored), Future[dict[str, float]])
