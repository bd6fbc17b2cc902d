"""What `register` promises beyond modes: memory that is only read, columns that are sent, modes of third parties."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from core._calls.call import Command, RankCall
from core._rows.wire import encode
from core._run.host import WorkerHost
from core.batch import object_column, objects
from core.dispatch import on_mesh, register
from core.errors import Refused, RegistryError, WorkerFailed
from core.group import RayClassWithInitArgs
from core.registry import EngineRegistry
from core.transport.local import LocalWorkerGroup
from core.worker import Worker, WorkerContext
from tests.fake_distributions import HEADER, forget, install
from tests.support.workers import mesh_of


def batch_of(rows: int = 4) -> TensorDict:
    names = object_column([{"row": i} for i in range(rows)])
    return TensorDict({"x": torch.arange(rows), "y": torch.arange(rows) / 2, "names": names}, batch_size=[rows])


class Reading(Worker):
    def __init__(self, dp_ranks: Any = (0, 1), collected: Any = (0, 1)) -> None:
        if self.world_size > 1:
            self.add_mesh("m", mesh_of(self.rank, dp_ranks, collected))

    @register(on_mesh("m"), reads_only=True)
    def reads(self, batch: Any, other: Any = None) -> Any:
        batch["sum"] = batch["x"] + objects(batch.get("names"))[0]["row"]  # a column of its own
        return batch

    @register(on_mesh("m"), reads_only=True)
    def lies(self, batch: Any, array: Any, rank: int, how: str) -> Any:
        if self.rank == rank:
            if how == "tensor":
                batch["y"].mul_(2)
            elif how == "object":
                objects(batch.get("names"))[0]["row"] = 9
            else:
                array[0] = 7
        return batch

    def address(self, tensor: Any) -> Any:
        return tensor.data_ptr()


@pytest.mark.parametrize("reads_only", [True, False])
def test_a_method_that_only_reads_gets_no_copy(reads_only: bool) -> None:
    host = WorkerHost()
    host.construct(Reading, (), {}, WorkerContext(), set_env=False)
    tensor = torch.arange(4)
    outcome: Any = host.run(Command("address", reads_only=reads_only), RankCall((encode(tensor),)), True)
    assert (outcome.value == tensor.data_ptr()) is reads_only


@pytest.mark.parametrize(
    ("how", "message"),
    [("tensor", "column 'y' of argument 0"), ("object", "column 'names' of argument 0"), ("array", "argument 1")],
)
def test_a_method_that_writes_although_it_said_not_to_is_named_with_rank_and_column(
    monkeypatch: pytest.MonkeyPatch, how: str, message: str
) -> None:
    monkeypatch.setenv("MANYMESH_CHECK_READS", "1")
    group = LocalWorkerGroup(RayClassWithInitArgs(Reading), world_size=2)
    assert group.reads(batch_of())["sum"].tolist() == [0, 1, 4, 5]
    with pytest.raises(WorkerFailed) as failure:
        group.lies(batch_of(), np.arange(2), 1, how)
    assert f"method 'lies' is registered with reads_only=True, but rank 1 wrote to {message}" in str(failure.value)


def test_a_column_that_a_reader_adds_is_no_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYMESH_CHECK_READS", "1")
    batch = batch_of()
    LocalWorkerGroup(RayClassWithInitArgs(Reading), world_size=2).reads(batch, other=batch)
    assert set(batch.keys()) == {"x", "y", "names"}


def test_only_the_columns_that_a_method_asks_for_are_sent() -> None:
    class Choosy(Reading):
        @register(on_mesh("m"), columns=["x", "absent"], uneven="pad")
        def some(self, batch: Any) -> Any:
            return [sorted(batch.keys())]

    group = LocalWorkerGroup(RayClassWithInitArgs(Choosy), world_size=2)
    assert group.some(batch_of()) == [[["x"]], [["x"]]]
    assert group.some(batch_of(3)) == [[["row_weight", "x"]], [["row_weight", "x"]]]


MODES = """\
import attrs
from core.dispatch import Dispatch

their_mode = attrs.evolve(Dispatch.ONE_TO_ALL, name="their_mode", collect=lambda call, answers: sum(answers.values()))
"""


@pytest.fixture
def with_their_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A plugin that offers a dispatch mode and nothing else."""
    light = (
        f"{HEADER}@hookimpl\ndef manymesh_manifests():\n"
        "    return [Manifest(kind='dispatch_mode', name='their_mode', factory='their_modes:their_mode')]\n"
    )
    install(tmp_path, "acme-modes", {"acme_modes.py": light, "their_modes.py": MODES})
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    registry = EngineRegistry.discover({})
    monkeypatch.setattr(EngineRegistry, "default", classmethod(lambda cls: registry))
    yield
    forget(tmp_path)


def named(mode: str) -> type[Worker]:
    class Named(Worker):
        @register(mode)
        def number(self) -> int:
            return self.rank + 1

    return Named


def test_a_plugins_mode_is_registered_by_its_name(with_their_mode: None) -> None:
    cls = named("their_mode")
    assert "their_modes" not in sys.modules  # a class is defined without asking plugins
    assert LocalWorkerGroup(RayClassWithInitArgs(cls), world_size=3).number() == 6
    assert LocalWorkerGroup(RayClassWithInitArgs(named("acme-modes:their_mode")), world_size=3).number() == 6


def test_an_unknown_mode_is_refused_with_the_nearest_name(with_their_mode: None) -> None:
    with pytest.raises(RegistryError, match="did you mean 'their_mode'"):
        LocalWorkerGroup(RayClassWithInitArgs(named("their_mod")))


def test_a_group_takes_a_class_and_its_arguments_and_keywords_are_the_groups_own() -> None:
    class Named(Worker):
        def __init__(self, prefix: str, name: str = "worker") -> None:
            self.full_name = prefix + name

        @register()
        def full(self) -> str:
            return self.full_name

    group = LocalWorkerGroup(Named, "a ", world_size=2, name="group")
    assert (group.name, group.workers.full()) == ("group", ["a worker", "a worker"])
    assert LocalWorkerGroup(Named, "a ", "b").workers.full() == ["a b"]
    assert LocalWorkerGroup(RayClassWithInitArgs(Named, "a ", name="c")).workers.full() == ["a c"]
    with pytest.raises(Refused, match="already has its arguments") as refused:
        LocalWorkerGroup(RayClassWithInitArgs(Named, "a "), 2)
    assert "world_size is a keyword" in refused.value.mend
