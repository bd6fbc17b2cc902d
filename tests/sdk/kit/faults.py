"""What a fault is: a class put before a sound backend's own, or a change of its registry entry."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import attrs

from core.manifest import Capability, Kind
from core.registry import Backend, EngineRegistry
from sdk.conformance.base import Conformance, Subject


def unchanged(entry: Backend) -> Backend:
    return entry


@attrs.frozen
class Mutant:
    """A sound backend with a fault in it.

    Attributes:
        name: what it does wrong, e.g. "averages instead of sums".
        tests: names of the tests that must find it.
        put_into: 'module:function' that takes what the registry built and returns what is tested.
        entry: changes the registry's entry.
    """

    name: str
    tests: tuple[str, ...]
    put_into: str | None = None
    entry: Callable[[Backend], Backend] = attrs.field(default=unchanged, repr=False, eq=False)


@attrs.frozen(kw_only=True)
class FaultySubject(Subject):
    """A subject that becomes the mutant on the rank that builds it."""

    put_into: str

    def build(self, **options: Any) -> Any:
        return pkgutil.resolve_name(self.put_into)(super().build(**options))


class OnMutant:
    """A suite that tests a mutant of its backend. It comes before the suite among the bases."""

    mutant: ClassVar[Mutant]

    @classmethod
    def entry(cls) -> Backend:
        return cls.mutant.entry(super().entry())  # type: ignore[misc]

    @classmethod
    def subject(cls) -> Subject:
        sound: Subject = super().subject()  # type: ignore[misc]
        if cls.mutant.put_into is None:
            return sound
        return FaultySubject(**attrs.asdict(sound, recurse=False), put_into=cls.mutant.put_into)

    @classmethod
    @contextmanager
    def register_for_workers(cls) -> Iterator[str]:
        """The mutant is registered at run time, as what goes along to the workers of Ray groups."""
        factory = FaultyFactory(cls.backend, cls.kind, cls.mutant.put_into)  # type: ignore[attr-defined]
        registry = EngineRegistry.default()
        entry = registry.register(attrs.evolve(cls.entry().manifest, name="mutant", factory=factory))
        try:
            yield entry.qualified_name
        finally:
            registry.unregister(entry)


@attrs.frozen
class FaultyFactory:
    """A manifest's factory: builds the sound backend and puts the fault into it."""

    backend: str
    kind: Kind
    put_into: str | None

    def __call__(self, config: Any, device: str | None) -> Any:
        sound = EngineRegistry.new(None, self.backend, config, device, self.kind)
        return pkgutil.resolve_name(self.put_into)(sound) if self.put_into else sound


def on_mutant(suite: type[Conformance], backend: str, mutant: Mutant, name: str, module: str) -> type[Conformance]:
    """A subclass of a suite that tests a mutant of a backend."""
    return type(name, (OnMutant, suite), {"__module__": module, "backend": backend, "mutant": mutant})


class Fault:
    """Base of the faults that are classes: put before the backend's class, so that `super()` is the backend, and what
    it doesn't override is as it was. Its docstring says what it does wrong."""

    tests: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def put_into(cls, backend: Any) -> Any:
        faulty = type(cls.__name__, (cls, type(backend)), {})
        mutant: Any = object.__new__(faulty)
        # One state for both. `__class__` of the backend itself can be set only where the classes' layouts are the same.
        mutant.__dict__ = vars(backend)
        mutant.__dict__["_sound"] = backend  # it must not be collected while the mutant lives
        return mutant

    @staticmethod
    def entry(entry: Backend) -> Backend:
        """See Mutant."""
        return entry

    if TYPE_CHECKING:  # what the backend has

        def __getattr__(self, name: str) -> Any: ...


FaultClass = TypeVar("FaultClass", bound=type[Fault])


def caught_by(*tests: str) -> Callable[[FaultClass], FaultClass]:
    """Names the tests that must find a fault."""

    def decorate(cls: FaultClass) -> FaultClass:
        cls.tests = tests
        return cls

    return decorate


def entry_fault(name: str, *tests: str) -> Callable[[Callable[[Backend], Backend]], Mutant]:
    """The mutant whose registry entry a function changes."""
    return lambda change: Mutant(name, tests, entry=change)


def mutants_in(modules: Iterable[ModuleType]) -> tuple[Mutant, ...]:
    """The mutants that modules define and that name their tests, in the order in which they stand there."""
    return tuple(mutant for module in modules for mutant in _mutants_of(module) if mutant.tests)


def _mutants_of(module: ModuleType) -> Iterator[Mutant]:
    for value in vars(module).values():
        if isinstance(value, Mutant):
            yield value
        elif isinstance(value, type) and issubclass(value, Fault) and value.__module__ == module.__name__:
            yield mutant_of(value, *vars(value).get("tests", ()))


def mutant_of(fault: type[Fault], *tests: str) -> Mutant:
    """The mutant with this fault, which these tests must find."""
    name = " ".join((fault.__doc__ or "").split()).rstrip(".")
    return Mutant(name, tests, f"{fault.__module__}:{fault.__qualname__}.put_into", fault.entry)


def with_manifest(entry: Backend, **changes: Any) -> Backend:
    return attrs.evolve(entry, manifest=attrs.evolve(entry.manifest, **changes))


def capabilities(entry: Backend) -> frozenset[Capability]:
    return entry.manifest.capabilities
