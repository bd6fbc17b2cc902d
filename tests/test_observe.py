"""Observers see every call and hurt none; a recorded call runs again alone."""

from __future__ import annotations

import io
import logging
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from core._rows.wire_tensor import num_bytes
from core._run.observers import MethodRun, Observer, Observers
from core.dispatch import on_mesh, register
from core.errors import WorkerFailed
from core.group import RayClassWithInitArgs
from core.transport.local import LocalWorkerGroup
from core.worker import Worker
from manymesh.replay import Recorder, main, replay
from tests.support.workers import Echo, mesh_of


def batch_of(rows: int = 4) -> TensorDict:
    return TensorDict({"x": torch.arange(rows)}, batch_size=[rows])


class Listening(Observer):
    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def before_dispatch(self, call: Any) -> None:
        self.heard.append(("before", call.group, call.method, call.spec.mesh, call.num_rows))

    def after_dispatch(self, call: Any, calls: Any, seconds: float) -> None:
        weights = {id(each): num_bytes((each.args, dict(each.kwargs))) for each in calls.values()}
        self.heard.append(("sent", call.num_rows, sum(weights.values()), seconds > 0))

    def after_collect(self, call: Any, answers: Any, seconds: float, error: BaseException | None) -> None:
        num = None if answers is None else num_bytes(list(answers.values()))
        self.heard.append(("collected", num, seconds > 0, type(error).__name__))

    def before_method(self, run: MethodRun) -> None:
        self.heard.append(("run", run.context.rank, run.command.method, run.command.mesh))

    def after_method(self, run: MethodRun, outcome: Any, seconds: float) -> None:
        self.heard.append(("ran", run.command.method, type(outcome).__name__, seconds > 0))


class Raising(Observer):
    def before_dispatch(self, call: Any) -> None:
        raise RuntimeError("an observer's own fault")

    def before_method(self, run: MethodRun) -> None:
        raise RuntimeError("an observer's own fault")


def observed(*observers: Observer, cls: type = Echo, world_size: int = 2, **kwargs: Any) -> LocalWorkerGroup:
    ranks = list(range(world_size))
    return LocalWorkerGroup(
        RayClassWithInitArgs(cls, ranks, ranks), world_size=world_size, observers=observers, **kwargs
    )


def test_an_observer_is_told_of_every_step_of_a_call_with_rows_bytes_and_times() -> None:
    listening = Listening()
    observed(listening, name="g").echo(batch_of())
    assert listening.heard == [
        ("before", "g", "echo", "m", None),
        ("run", 0, "echo", "m"),
        ("ran", "echo", "Answered", True),
        ("run", 1, "echo", "m"),
        ("ran", "echo", "Answered", True),
        ("sent", 4, 32, True),
        ("collected", 32, True, "NoneType"),
    ]


def test_an_observer_is_told_of_a_call_that_fails_too() -> None:
    listening = Listening()
    with pytest.raises(WorkerFailed):
        observed(listening).edit(batch_of().exclude("x"))
    assert listening.heard[-1] == ("collected", None, True, "WorkerFailed")
    assert ("ran", "edit", "Raised", True) in listening.heard


def test_an_observer_that_raises_is_logged_once_and_hurts_neither_the_call_nor_its_neighbour(
    caplog: pytest.LogCaptureFixture,
) -> None:
    listening = Listening()
    group = observed(Raising(), listening)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert group.echo(batch_of())["x"].tolist() == [0, 1, 2, 3]
    assert [record.message.partition("failed in ")[2] for record in caplog.records] == [
        "before_dispatch",
        "before_method",
        "before_method",  # once in each rank
    ]
    assert sum(each[0] == "before" for each in listening.heard) == 3


def test_an_observer_that_hears_of_no_method_does_not_travel_to_the_workers() -> None:
    class Driver(Observer):
        lock = threading.Lock()  # cannot be pickled

        def before_dispatch(self, call: Any) -> None: ...

    assert Observers([Driver(), Listening()]).of_workers()[0].__class__ is Listening


class Drawing(Worker):
    """Its answers depend on its state, on three generators and on its rank."""

    def __init__(self, dp_ranks: Any, collected: Any) -> None:
        self.add_mesh("m", mesh_of(self.rank, dp_ranks, collected))
        self.sum = torch.zeros(())

    @register(on_mesh("m"))
    def draw(self, batch: Any) -> Any:
        self.sum += torch.rand(()) + float(np.random.rand()) + random.random() + self.rank
        batch["drawn"] = self.sum + batch["x"] * torch.tensor(self.shard.row_numbers())  # type: ignore[union-attr]
        return batch

    @register()
    def meet(self) -> None:
        self.init_process_group()


def recorded(directory: Path, calls: int = 3) -> LocalWorkerGroup:
    group = observed(Recorder(str(directory)), cls=Drawing)
    for _ in range(calls):
        answer = group.draw(batch_of())
    assert not torch.equal(answer["drawn"][:2], answer["drawn"][2:])
    return group


def test_a_recorded_call_gives_the_same_answer_to_the_bit_in_one_process(tmp_path: Path, capsys: Any) -> None:
    recorded(tmp_path)
    torch.manual_seed(5)
    for rank in (0, 1):
        assert main([str(tmp_path), "--rank", str(rank)]) == 0
        assert main([str(tmp_path), "--rank", str(rank), "--call", "2"]) == 0
    assert capsys.readouterr().out.count("the same answer, to the bit") == 4
    assert replay(tmp_path, 1).answer["x"].tolist() == [2, 3]


def test_a_replay_that_comes_to_another_answer_says_so(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(tmp_path)
    monkeypatch.setattr("manymesh.replay._restore", lambda states: None)
    assert main([str(tmp_path), "--rank", "1"]) == 1
    assert "ANOTHER ANSWER" in capsys.readouterr().out


def test_what_needs_peers_or_was_not_recorded_is_refused(tmp_path: Path, capsys: Any) -> None:
    group = recorded(tmp_path, 1)
    with pytest.raises(Exception, match=r"cannot form|another torch\.distributed world"):
        group.meet()
    assert main([str(tmp_path), "--rank", "0"]) == 2
    assert "'meet' cannot be replayed by one rank alone" in capsys.readouterr().err
    assert main([str(tmp_path), "--rank", "0", "--call", "1"]) == 0
    assert main([str(tmp_path), "--rank", "7"]) == 2
    assert main([str(tmp_path), "--rank", "0", "--call", "9"]) == 2


def test_pdb_stops_at_the_methods_first_line(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("p self.rank, batch['x'].tolist()\nc\n"))
    assert main([str(tmp_path), "--rank", "1", "--pdb"]) == 0
    out = capsys.readouterr().out
    assert "self.sum +=" in out
    assert "(1, [2, 3])" in out


@pytest.mark.ci
def test_a_recorder_travels_to_ray_workers(ray_cluster: None, tmp_path: Path) -> None:
    from core.transport.ray import RayResourcePool, RayWorkerGroup

    worker = RayClassWithInitArgs(Echo, [0, 1], [0, 1])
    with RayResourcePool([2]) as pool, RayWorkerGroup(pool, worker, observers=[Recorder(str(tmp_path), [1])]) as group:
        rows = group.make_later(batch_of())[0]
        assert group.echo(rows)["x"].tolist() == [0, 1, 2, 3]
    assert [each.name for each in tmp_path.iterdir()] == ["rank-1"]
    result = replay(tmp_path, 1)
    assert (result.method, result.equal, result.answer["x"].tolist()) == ("echo", True, [2, 3])
