"""Backends that are registered at run time: in this process, and in the workers that it starts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from core import Dispatch, EngineRegistry, Manifest, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker
from core.dispatch import register
from core.errors import ConfigError, RegistryError
from core.registry import RUN_TIME, Backend, Choice, Status
from core.transport.local import LocalWorkerGroup


@attrs.frozen
class Config:
    size: int = 1


class Importable:
    """Stands in a module, so it travels by its name."""

    def __init__(self, config: Config, device: str | None) -> None:
        self.text = f"{type(self).__name__} of size {config.size} on {device}"


# What somebody types into a notebook: no process can import it.
NOTEBOOK = """
import attrs

@attrs.frozen
class Config:
    size: int = 1

def helper(size):
    return size * 10

class Typed:
    def __init__(self, config, device):
        self.text = f"typed, {helper(config.size)} on {device}"
"""


def typed() -> Manifest:
    cells: dict[str, Any] = {"__name__": "a_notebook"}
    exec(NOTEBOOK, cells)
    return Manifest(kind="engine", name="typed", factory=cells["Typed"], config=cells["Config"])


IMPORTABLE = Manifest(kind="engine", name="importable", factory=Importable, config=Config, summary="of a module")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> EngineRegistry:
    """The process's own, without what another test has registered."""
    registry = EngineRegistry.discover({})
    monkeypatch.setattr(EngineRegistry, "default", classmethod(lambda cls: registry))
    return registry


def test_a_registered_backend_is_listed_found_and_built_like_an_installed_one(registry: EngineRegistry) -> None:
    backend = registry.register(IMPORTABLE)
    assert (backend.status, backend.distribution, backend.choice) == (
        Status.OK,
        RUN_TIME,
        Choice("engine", "importable", RUN_TIME, ""),
    )
    assert backend in registry.entries
    assert [entry.place for entry in registry.entries] == sorted(entry.place for entry in registry.entries)
    assert EngineRegistry.get("importable") is EngineRegistry.get("run-time:importable") is backend
    engine = EngineRegistry.new(None, "importable", {"size": 2}, "cpu", expect=backend.choice)
    assert engine.text == "Importable of size 2 on cpu"
    with pytest.raises(ConfigError, match="sise"):
        backend.config({"sise": 2})
    registry.unregister(backend)
    with pytest.raises(RegistryError, match="there is no engine 'importable'"):
        registry.find("importable")


def test_the_second_of_a_name_takes_the_place_of_the_first_as_in_a_notebook(registry: EngineRegistry) -> None:
    registry.register(IMPORTABLE)
    again = registry.register(attrs.evolve(IMPORTABLE, summary="mended"))
    assert registry.registered == (again,)
    assert registry.find("importable").manifest.summary == "mended"


def test_one_of_the_name_of_an_installed_backend_must_be_qualified(registry: EngineRegistry) -> None:
    registry.register(attrs.evolve(IMPORTABLE, name="fsdp"))
    with pytest.raises(RegistryError, match="ambiguous") as raised:
        registry.find("fsdp")
    assert raised.value.mend == "ask for manymesh-fsdp:fsdp or run-time:fsdp"


def test_what_a_registered_backend_requires_is_looked_for(registry: EngineRegistry) -> None:
    backend = registry.register(attrs.evolve(IMPORTABLE, requires=(("nobody-has-this>=1",),)))
    assert backend.status is Status.MISSING_DEPENDENCY


def test_a_registered_dispatch_mode_is_used_by_its_name(registry: EngineRegistry) -> None:
    mode = attrs.evolve(Dispatch.ONE_TO_ALL, name="total", collect=lambda call, answers: sum(answers.values()))
    registry.register(Manifest(kind="dispatch_mode", name="total", factory=mode))

    class Counting(Worker):
        @register("total")
        def number(self) -> int:
            return self.rank + 1

    assert LocalWorkerGroup(RayClassWithInitArgs(Counting), world_size=3).number() == 6


class Asking(Worker):
    @register(Dispatch.RANK_ZERO)
    def build(self, name: str, expect: Choice | None = None) -> str:
        return str(EngineRegistry.new(None, name, {"size": 3}, "cpu", expect=expect).text)

    @register(Dispatch.RANK_ZERO)
    def status(self, name: str) -> str:
        (entry,) = EngineRegistry.default().named(name)
        return str(entry.status)


@pytest.fixture
def pool(ray_cluster: None) -> Iterator[RayResourcePool]:
    with RayResourcePool([1], name="asking") as pool:
        yield pool


def test_registered_backends_go_along_to_workers_by_name_or_by_value_and_the_rest_is_refused_with_the_mend(
    registry: EngineRegistry, pool: RayResourcePool
) -> None:
    def locked(config: Config, device: str | None, lock: Any = threading.Lock()) -> None: ...  # noqa: B008

    backends: list[Backend] = [registry.register(IMPORTABLE), registry.register(typed())]
    registry.register(attrs.evolve(IMPORTABLE, name="locked", factory=locked))
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Asking))
    assert group.build("importable", backends[0].choice) == "Importable of size 3 on cpu"
    assert group.build("typed", backends[1].choice) == "typed, 30 on cpu"

    assert registry.find("locked").status is Status.OK
    assert group.status("locked") == "broken"
    for expect in (None, registry.find("locked").choice):
        with pytest.raises(RegistryError, match="cannot pickle") as raised:
            group.build("locked", expect)
        assert "move it to a module that workers can import" in str(raised.value)

    late = registry.register(attrs.evolve(IMPORTABLE, name="late"))
    with pytest.raises(RegistryError) as raised:
        group.build("late", late.choice)
    assert "register it before the group is started" in str(raised.value)
