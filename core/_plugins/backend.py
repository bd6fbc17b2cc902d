"""What became of a plugin, and what can be done with one of its backends: plan, build, check."""

from __future__ import annotations

import importlib.metadata
import os
import pkgutil
import shlex
import socket
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any, Literal

import attrs
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from core.config import structure
from core.errors import RegistryError
from core.manifest import ON_DEVICE, Kind, Manifest, ModelFacts, Plan
from core.memory import Load, Memory

RUN_TIME = "run-time"  # stands for the distribution of what was registered at run time


class Status(StrEnum):
    """What became of a plugin's backend. Only `ok` ones can be built."""

    OK = "ok"
    DISABLED = "disabled"  # MANYMESH_PLUGINS leaves it out; not imported
    INCOMPATIBLE = "incompatible"  # speaks another version of the plugin API; not imported
    MISSING_DEPENDENCY = "missing-dependency"  # its manifest requires what isn't installed
    BROKEN = "broken"  # raised or exited while it was imported or asked, or gave nonsense
    SHADOWED = "shadowed"  # another folder or file of its module's name would be imported in its place; not imported


@attrs.frozen
class Choice:
    """A backend as the driver chose it: a value to ship to workers, which check it against what they have."""

    kind: Kind
    name: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} of {self.distribution} {self.version}".rstrip()

    def refusal(self, have: str, mend: str = "") -> RegistryError:
        """For a process that has something else."""
        if self.distribution == RUN_TIME:
            mend = mend or "register it before the group is started"
        return RegistryError(
            "this process has not what the driver chose",
            have=have,
            want=str(self),
            where=f"process {os.getpid()} on {socket.gethostname()}",
            mend=mend or f"pip install {self.distribution}=={self.version} on every node",
        )


@attrs.frozen
class Entry:
    """One line of the listing: a Backend, or an entry point that came to no manifest.

    Attributes:
        name, kind: of the manifest; without one, the entry point's name, and None.
        distribution, version: who offers it. Names are normalised (`my-engine`); the version is "" where there is none.
        reason, mend: why it cannot be used, and what to do about it; "" when ok.
        module: the entry point's value; "" for what was registered at run time.
        error: what a broken plugin raised.
    """

    name: str
    kind: Kind | None
    status: Status
    distribution: str
    version: str
    module: str
    reason: str = ""
    mend: str = ""
    error: BaseException | None = attrs.field(default=None, repr=False, eq=False)

    @property
    def place(self) -> tuple[str, str, str]:
        """In the order of a listing."""
        return self.name, self.kind or "", self.distribution

    @property
    def qualified_name(self) -> str:
        return f"{self.distribution}:{self.name}"

    def __str__(self) -> str:
        text = f"{self.kind or 'plugin'} {self.name!r} of {self.distribution} {self.version}".rstrip()
        return text if self.status is Status.OK else f"{text} ({self.status}: {self.reason})"

    def refusal(self, name: str) -> RegistryError:
        """For one who asks for it by `name` although it cannot be used."""
        owner = f"{self.distribution} {self.version}".rstrip()
        error = RegistryError(f"{name!r} of {owner} is {self.status}: {self.reason}", mend=self.mend)
        error.__cause__ = self.error
        return error


@attrs.frozen
class Backend(Entry):
    """An entry with a manifest. Its methods import what they need of the backend, and nothing of any other."""

    manifest: Manifest = attrs.field(kw_only=True, repr=False)

    @property
    def choice(self) -> Choice:
        return Choice(str(self.kind), self.name, self.distribution, self.version)

    def load(self, what: Literal["factory", "config", "planner", "memory"]) -> Any:
        """The object that the manifest names, not called; None where it names none.

        Raises:
            RegistryError: it cannot be imported; the cause says why.
        """
        path = getattr(self.manifest, what)
        if not isinstance(path, str):
            return path
        try:
            return pkgutil.resolve_name(path)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            module = path.partition(":")[0]
            raise RegistryError(
                f"the {what} of {self} cannot be imported: {type(error).__name__}: {error}",
                where=path,
                mend=f"`python -c 'import {module}'` shows the traceback; reinstall {self.distribution}",
            ) from error

    def config(self, options: Any) -> Any:
        """An instance of the config class, from one or from a mapping of options; the options as they are where the
        backend has no such class.

        Raises:
            RegistryError: as `load`.
            ConfigError: the options are not the backend's.
        """
        cls = self.load("config")
        return options if cls is None else structure(cls, options, where=f"config of {self.kind} {self.name!r}")

    def plan(self, options: Any, world_size: int, model: ModelFacts | None) -> Plan | None:
        """Where the backend puts itself on a world of ranks; None when it plans nothing before it is built.

        Raises:
            RegistryError: as `load`, or the planner gives no Plan.
            ConfigError: as `config`.
            Refused: by the planner, naming the legal values.
        """
        planner = self.load("planner")
        if planner is None:
            return None
        plan = planner(self.config(options), world_size, model)
        if not isinstance(plan, Plan):
            raise RegistryError(f"the planner of {self} gives no Plan", have=repr(plan))
        return plan

    def memory(self, options: Any, world_size: int, model: ModelFacts, load: Load) -> tuple[Memory, ...]:
        """What a rank would hold in each phase; nothing where the backend gives no estimate.

        Raises:
            RegistryError: as `load`.
            ConfigError: as `config`.
            Refused: by the planner or the estimator.
        """
        estimate = self.load("memory")
        if estimate is None:
            return ()
        self.plan(options, world_size, model)
        return tuple(estimate(self.config(options), world_size, model, load))

    def build(self, options: Any, device: str | None = None, model_type: str | None = None) -> Any:
        """Call the factory in this process, as Manifest.factory says.

        Args:
            options: see `config`.
            model_type: told to a backend that offers several.

        Raises:
            RegistryError, ConfigError: as `config`.
        """
        arguments: dict[str, Any] = {"device": device} if self.kind in ON_DEVICE else {}
        if len(self.manifest.model_types) > 1:
            arguments["model_type"] = model_type
        config = self.config(options)
        return self.load("factory")(config, **arguments)

    def check(self, choice: Choice) -> None:
        """See that it is what another process chose: the same name, distribution and version.

        Raises:
            RegistryError: naming both sides, and this process.
        """
        if self.choice != choice:
            same = attrs.evolve(self.choice, version=choice.version) == choice
            mend = "" if same else f"ask for {choice.distribution}:{choice.name}"
            raise choice.refusal(str(self.choice), mend)

    def needs(self, version_of: Callable[[str], str | None] | None = None) -> list[Need]:
        """What the manifest requires, group by group.

        Args:
            version_of: version of an installed distribution, None where it isn't; by default looked up.
        """
        return [Need.of(group, version_of or installed_version) for group in self.manifest.requires]


@attrs.frozen
class Need:
    """One group of a manifest's requirements: the alternatives, what is installed of them, and whether one is met."""

    any_of: tuple[str, ...]
    have: dict[str, str | None]
    met: bool

    @classmethod
    def of(cls, group: Iterable[str], version_of: Callable[[str], str | None]) -> Need:
        alternatives = [Requirement(text) for text in group]
        have = {one.name: version_of(one.name) for one in alternatives}
        return cls(tuple(group), have, any(_is_met(one, have[one.name]) for one in alternatives))

    @property
    def installed(self) -> str:
        return ", ".join(f"{name} {version or 'not installed'}" for name, version in self.have.items())


def _is_met(requirement: Requirement, version: str | None) -> bool:
    if requirement.marker is not None and not requirement.marker.evaluate():
        return True
    # A nightly build that is installed was installed on purpose.
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def with_needs(backend: Backend, version_of: Callable[[str], str | None]) -> Backend:
    """The backend with status, reason and mend of what it lacks."""
    unmet = [need for need in backend.needs(version_of) if not need.met]
    if not unmet:
        return backend
    reasons = [
        f"needs {' or '.join(need.any_of)}: "
        + ", ".join(f"{name} is {version or 'not installed'}" for name, version in need.have.items())
        for need in unmet
    ]
    mend = f"pip install {' '.join(shlex.quote(need.any_of[0]) for need in unmet)}"
    return attrs.evolve(backend, status=Status.MISSING_DEPENDENCY, reason="; ".join(reasons), mend=mend)


def installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def named(entries: Iterable[Entry], name: str) -> list[Entry]:
    """The entries that `name` means: "backend", "distribution:backend", or "distribution", which means all that it
    offers unless a backend is called so. Distributions may be spelled in any form (`My_Engine`).

    A plugin that came to no manifest is meant by any backend of its distribution.
    """
    owner, _, bare = name.rpartition(":")
    distribution = canonicalize_name(owner or bare)
    theirs = [entry for entry in entries if not owner or entry.distribution == distribution]
    return [entry for entry in theirs if entry.name == bare] or [
        entry for entry in theirs if entry.distribution == distribution and not (owner and isinstance(entry, Backend))
    ]
