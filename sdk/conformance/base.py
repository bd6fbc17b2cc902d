"""What every suite has: the backend that is tested, the ranks it runs on, and tests that open by what it offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import attrs
import pytest

from core.manifest import Capability, Kind, Manifest, Plan
from core.model_facts import ModelFacts
from core.registry import Backend, EngineRegistry
from sdk.conformance.closeness import BOUNDS, Bounds

if TYPE_CHECKING:
    from sdk.testing import Worlds

T = TypeVar("T")
Test = TypeVar("Test", bound=Callable[..., Any])
GATE = "__manymesh_gate__"


@attrs.frozen
class Gate:
    """When a test is open. `closed(suite)` gives the reason why it isn't, or ""."""

    capability: Capability | None
    closed: Callable[[type[Conformance]], str]


def offered(*capabilities: Capability) -> Callable[[Test], Test]:
    """A test of what a backend offers: closed where the manifest lacks any of the capabilities."""

    def mark(test: Test) -> Test:
        for each in capabilities:
            test = gate(partial(_lacks, each), each)(test)
        return test

    return mark


def _lacks(capability: Capability, suite: type[Conformance]) -> str:
    return "" if capability in suite.capabilities() else f"{capability} not offered"


def absent(capability: Capability) -> Callable[[Test], Test]:
    """A test of what a backend does not offer: asking for it raises. Closed where the manifest has the capability."""
    return gate(lambda suite: f"{capability} offered" if capability in suite.capabilities() else "", capability)


def gate(closed: Callable[[type[Conformance]], str], capability: Capability | None = None) -> Callable[[Test], Test]:
    """A test that is closed where `closed(suite)` gives a reason. A test may have several gates."""

    def mark(test: Test) -> Test:
        setattr(test, GATE, (*getattr(test, GATE, ()), Gate(capability, closed)))
        return test

    return mark


@attrs.frozen
class Subject:
    """The backend under test, as it travels to the ranks that build it.

    Attributes:
        config: the adopter's options.
    """

    kind: Kind
    backend: str
    model_type: str | None
    config: Mapping[str, Any]
    device: str

    def build(self, **options: Any) -> Any:
        """The backend in this process, built by the registry from the adopter's options and these."""
        config = {**self.config, **options}
        return EngineRegistry.new(self.model_type, self.backend, config, self.device, kind=self.kind)


class Conformance:
    """Base of the suites. A subclass in a plugin's tests sets `backend`, and pytest runs the suite on it.

    Attributes:
        backend: its name in the registry, or "distribution:name".
        model_type: of several that the manifest has; None: the language model.
        config: options of the backend, for every test; the kit adds the model and what a test varies.
        worlds: numbers of ranks; empty: the first two of 1, 2, 4, 8 that the planner takes.
        device: where the backend runs.
        dtype: of its passes: the backend's option `dtype` where it has one and `config` doesn't set it. Results are
            held to the bounds of this dtype (sdk.conformance.closeness.BOUNDS). For an engine with fp32 parameters and
            passes in bf16 it is "bfloat16", and `config` says the rest.
        expected_failures: tests that are known to fail, each with the reason. One that passes fails.
    """

    kind: ClassVar[Kind]
    backend: ClassVar[str] = ""
    model_type: ClassVar[str | None] = None
    config: ClassVar[Mapping[str, Any]] = {}
    worlds: ClassVar[Sequence[int]] = ()
    device: ClassVar[str] = "cpu"
    dtype: ClassVar[str] = "float32"
    expected_failures: ClassVar[Mapping[str, str]] = {}

    @pytest.fixture(autouse=True)
    def _places(self, conformance_session: Any) -> None:
        self.session = conformance_session

    # What is tested

    @classmethod
    def entry(cls) -> Backend:
        """The registry's entry, also of a backend that lacks a dependency.

        Raises:
            RegistryError: unknown, ambiguous or without a manifest.
        """
        return EngineRegistry.default().find(cls.backend, cls.kind, elsewhere=True)

    @classmethod
    def manifest(cls) -> Manifest:
        return cls.entry().manifest

    @classmethod
    def capabilities(cls) -> frozenset[Capability]:
        return cls.manifest().capabilities

    @classmethod
    def config_class(cls) -> Any:
        return cls.entry().load("config")

    @classmethod
    def has_option(cls, name: str) -> bool:
        return name in {field.name for field in attrs.fields(cls.config_class())}

    @classmethod
    def planned(cls, world_size: int, model: str | None = None, **options: Any) -> Plan | None:
        """What the planner answers; None without a planner. Raises Refused as the planner does."""
        data = {"model": model or "model", **cls.options(), **options}
        return cls.entry().plan(data, world_size, ModelFacts.read(model) if model else None)

    @classmethod
    def worlds_used(cls) -> tuple[int, ...]:
        """`worlds`, or the first two that the planner takes."""
        if cls.worlds:
            return tuple(cls.worlds)
        return tuple(size for size in (1, 2, 4, 8) if cls._can_be(size))[:2]

    @classmethod
    def _can_be(cls, world_size: int) -> bool:
        from core.errors import Refused

        try:
            cls.planned(world_size)
        except Refused:
            return False
        return True

    @classmethod
    def subject(cls) -> Subject:
        return Subject(cls.kind, cls.backend, cls.model_type, cls.options(), cls.device)

    @classmethod
    def options(cls) -> dict[str, Any]:
        """`config`, and the dtype where the backend has such an option."""
        computes = cls.kind in ("engine", "rollout") and cls.has_option("dtype")
        return ({"dtype": cls.dtype} if computes else {}) | dict(cls.config)

    @property
    def bounds(self) -> Bounds:
        """How near results must be to those of the reference."""
        return BOUNDS[self.dtype]

    # Where it runs

    def on(self, world_size: int, job: Callable[..., T], *args: Any, **kwargs: Any) -> list[T]:
        """`job(rank, world_size, subject, *args, **kwargs)` on every rank; the answers by rank.

        A job gives data and the test judges it: a job that raises costs the others their ranks.
        """
        answers: list[T] = self.session.worlds(world_size, job, self.subject(), *args, **kwargs)
        return answers

    def model(self, family: str = "qwen3", **options: Any) -> str:
        """A directory with a tiny model (sdk.testing.tiny_model), the same for the same arguments. Its weights are
        large enough that predictions are far from uniform."""
        return str(self.session.model(family, **options))

    def once(self, key: object, make: Callable[[], T]) -> T:
        """`make()`, the first time that a suite with this subject asks for the key; then what it gave."""
        value: T = self.session.once((repr(self.subject()), repr(key)), make)
        return value


class Session:
    """What the suites of one pytest session share: worlds of ranks, models on disk, and what was made once."""

    def __init__(self, worlds: Worlds, directory: Callable[[str], Path]) -> None:
        self.worlds = worlds
        self.directory = directory
        self._made: dict[Any, Any] = {}

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def model(self, family: str = "qwen3", **options: Any) -> str:
        """See Conformance.model."""
        from sdk.testing import tiny_model

        options = {"initializer_range": 0.1} | options
        key = ("model", family, repr(sorted(options.items())))
        return str(self.once(key, lambda: tiny_model(self.directory(family), family, **options)))
