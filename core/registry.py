"""Choosing a backend by name, and building it in the process that uses it."""

from __future__ import annotations

import functools
import os
import pkgutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import attrs
from packaging.utils import canonicalize_name

from core._plugins.discovery import PLUGINS_VARIABLE, Choice, Entry, Status, check_core, discover
from core.config import structure
from core.errors import RegistryError, did_you_mean
from core.manifest import KINDS, Kind, Manifest, ModelFacts, Plan

if TYPE_CHECKING:
    from core._calls.call import DispatchMode

__all__ = ["PLUGINS_VARIABLE", "Choice", "EngineRegistry", "Entry", "Status", "check_core"]


@attrs.frozen
class EngineRegistry:
    """The backends of a process.

    `discover()` makes one; `get` and `new` ask the process's own, which is discovered once. A backend is asked for by
    its name, or by `distribution:name` where two distributions offer the same.
    """

    entries: tuple[Entry, ...]

    @classmethod
    def discover(cls, env: Mapping[str, str] = os.environ) -> EngineRegistry:
        """What is installed. Imports the plugins' light modules, none of their backends. Never raises for a plugin."""
        return cls(discover(env))

    @classmethod
    def default(cls) -> EngineRegistry:
        """The process's own, discovered at the first call."""
        return _default()

    @classmethod
    def get(
        cls,
        name: str,
        kind: Kind = "engine",
        model_type: str | None = None,
        device: str | None = None,
        vendor: str | None = None,
    ) -> Entry:
        """`resolve` of the process's own registry."""
        return cls.default().resolve(name, kind, model_type, device, vendor)

    @classmethod
    def new(
        cls,
        model_type: str | None,
        backend: str,
        config: Any,
        device: str | None = None,
        kind: Kind = "engine",
        *,
        vendor: str | None = None,
        expect: Choice | None = None,
    ) -> Any:
        """`build` of the process's own registry."""
        return cls.default().build(model_type, backend, config, device, kind, vendor=vendor, expect=expect)

    def resolve(
        self,
        name: str,
        kind: Kind = "engine",
        model_type: str | None = None,
        device: str | None = None,
        vendor: str | None = None,
        *,
        elsewhere: bool = False,
    ) -> Entry:
        """The one usable backend of this name.

        Args:
            name: "name" or "distribution:name".
            model_type, device, vendor: what it must offer; None leaves it open. Of a device ("cuda:1") the type counts.
            elsewhere: it is for workers in another environment, so that what it requires may be missing here.

        Raises:
            RegistryError: unknown, ambiguous, not usable (broken, disabled, ...; its own error is the cause), or it
                doesn't offer what is asked.
        """
        owner, _, bare = name.rpartition(":")
        named = [
            (entry, entry.manifest)
            for entry in self.entries
            if entry.manifest is not None
            and (entry.kind, entry.name) == (kind, bare)
            and (not owner or entry.distribution == canonicalize_name(owner))
        ]
        if not named:
            raise self._unknown(name, kind)
        lacks = [_lacks(manifest, model_type, device, vendor) for _, manifest in named]
        fitting = [pair for pair, lack in zip(named, lacks, strict=True) if not lack]
        if not fitting:
            raise RegistryError(
                f"{kind} {name!r} is not for {lacks[0]}",
                want="; or ".join(_offers(manifest) for _, manifest in named),
                where=", ".join(str(entry) for entry, _ in named),
                mend="ask for what it offers, or choose another backend",
            )
        if len(fitting) > 1:
            forms = sorted({f"{entry.distribution}:{entry.name}" for entry, _ in fitting})
            offers = "; or ".join(_offers(manifest) for _, manifest in fitting)
            raise RegistryError(
                f"{kind} {name!r} is ambiguous",
                have=", ".join(str(entry) for entry, _ in fitting),
                mend=f"ask for {' or '.join(forms)}" if len(forms) > 1 else f"ask for one of: {offers}",
            )
        ((entry, _),) = fitting
        if entry.status is not Status.OK and not (elsewhere and entry.status is Status.MISSING_DEPENDENCY):
            raise _unusable(entry, name) from entry.error
        return entry

    def build(
        self,
        model_type: str | None,
        backend: str,
        config: Any,
        device: str | None = None,
        kind: Kind = "engine",
        *,
        vendor: str | None = None,
        expect: Choice | None = None,
    ) -> Any:
        """Import the chosen backend's factory, and no other's, and call it as Manifest.factory says.

        Args:
            config: an instance of the manifest's config class, or a mapping of its options.
            expect: what the driver chose; this process must come to the same.

        Raises:
            RegistryError: as `resolve`; it cannot be imported (the cause says why); or this process has not what the
                driver chose.
            ConfigError: the options are not the backend's.
        """
        if expect is not None:
            self.verify(expect)
        entry = self.resolve(backend, kind, model_type, device, vendor)
        if expect is not None and entry.choice != expect:
            raise _differs(expect, str(entry.choice), f"ask for {expect.distribution}:{expect.name}")
        options = structure(load(entry, "config"), config, where=f"config of {kind} {entry.name!r}")
        several = entry.manifest is not None and len(entry.manifest.model_types) > 1
        asked = {"model_type": model_type} if several else {}
        return load(entry, "factory")(options, device=device, **asked)

    def load(self, name: str, kind: Kind) -> Any:
        """What the manifest's factory names, imported but not called. Raises RegistryError as `resolve`."""
        return load(self.resolve(name, kind), "factory")

    def dispatch_mode(self, name: str) -> DispatchMode:
        """The mode that a plugin offers under this name, by a manifest of kind "dispatch_mode".

        Raises:
            RegistryError: as `resolve`, or what the plugin names is no DispatchMode.
        """
        from core._calls.call import DispatchMode

        mode = self.load(name, "dispatch_mode")
        if not isinstance(mode, DispatchMode):
            raise RegistryError(f"the dispatch mode {name!r} is no DispatchMode", have=repr(mode))
        return mode

    def plan(
        self,
        backend: str,
        config: Any,
        world_size: int,
        model: ModelFacts | None,
        kind: Kind = "engine",
        *,
        elsewhere: bool = False,
    ) -> Plan | None:
        """Where the backend puts itself on a world of ranks; None when it plans nothing before it is built.

        Args:
            elsewhere: see `resolve`.

        Raises:
            RegistryError: as `resolve`, or planner or config class cannot be imported.
            ConfigError: the options are not the backend's.
            Refused: by the planner, naming the legal values.
        """
        entry = self.resolve(backend, kind, elsewhere=elsewhere)
        if entry.manifest is None or entry.manifest.planner is None:
            return None
        options = structure(load(entry, "config"), config, where=f"config of {kind} {entry.name!r}")
        plan = load(entry, "planner")(options, world_size, model)
        if not isinstance(plan, Plan):
            raise RegistryError(f"the planner of {entry} gives no Plan", have=repr(plan))
        return plan

    def verify(self, choice: Choice) -> None:
        """See that this process has what another process chose: the same name, distribution and version, usable.

        Raises:
            RegistryError: naming both sides, and this process.
        """
        related = [entry for entry in self.entries if entry.distribution == choice.distribution]
        same = [entry for entry in related if entry.choice == choice]
        if not same:
            have = ", ".join(map(str, related)) or f"no distribution {choice.distribution}"
            pin = f"pip install {choice.distribution}=={choice.version} on every node"
            raise _differs(choice, have, pin)
        if all(entry.status is not Status.OK for entry in same):
            raise _differs(choice, str(same[0]), same[0].mend) from same[0].error

    def _unknown(self, name: str, kind: Kind) -> RegistryError:
        """For a name that no manifest has: the plugin that failed before it gave any, else the nearest names."""
        if kind not in KINDS:
            return RegistryError(f"there is no kind {kind!r} of backend", mend=did_you_mean(kind, KINDS))
        owner, _, bare = name.rpartition(":")
        silent = [entry for entry in self.entries if entry.manifest is None]
        for entry in silent:
            by_owner = owner and entry.distribution == canonicalize_name(owner)
            if by_owner or (not owner and bare in (entry.name, entry.distribution)):
                error = _unusable(entry, name)
                error.__cause__ = entry.error
                return error
        others = [e.kind for e in self.entries if e.kind not in (None, kind) and e.name == bare]
        known = [e for e in self.entries if e.kind == kind]
        names = {f"{e.distribution}:{e.name}" if owner else e.name for e in known}
        have = ", ".join(sorted(names)) or "none"
        if silent:
            have += f" (without manifests: {', '.join(map(str, silent))})"
        if others:
            mend = f"it is a {others[0]}: ask with kind={others[0]!r}"
        elif names:
            mend = did_you_mean(name, names)
        else:
            mend = "install a plugin that offers it; `python -m core.list_engines` says what is there"
        return RegistryError(f"there is no {kind} {name!r}", have=have, mend=mend)


@functools.cache
def _default() -> EngineRegistry:
    return EngineRegistry.discover()


def _lacks(offered: Manifest, model_type: str | None, device: str | None, vendor: str | None) -> str:
    """What is asked for and not offered, in words; "" when all is."""
    asked = {
        "model type": (model_type, offered.model_types),
        "device": (device.partition(":")[0] if device else None, offered.devices),
        "vendor": (vendor, offered.vendors or {vendor}),
    }
    return ", ".join(f"{what} {want!r}" for what, (want, has) in asked.items() if want and want not in has)


def _offers(offered: Manifest) -> str:
    sets = {"model type": offered.model_types, "device": offered.devices, "vendor": offered.vendors}
    return ", ".join(f"{what} {' or '.join(sorted(has)) or 'any'}" for what, has in sets.items())


def _unusable(entry: Entry, name: str) -> RegistryError:
    there = f"{entry.distribution} {entry.version}".rstrip()
    return RegistryError(f"{name!r} of {there} is {entry.status}: {entry.reason}", mend=entry.mend)


def _differs(choice: Choice, have: str, mend: str) -> RegistryError:
    import socket

    return RegistryError(
        "this process has not what the driver chose",
        have=have,
        want=str(choice),
        where=f"process {os.getpid()} on {socket.gethostname()}",
        mend=mend,
    )


def load(entry: Entry, what: Literal["factory", "config", "planner"]) -> Any:
    """Import an object that a manifest names. Raises RegistryError where it cannot be."""
    path = getattr(entry.manifest, what)
    try:
        return pkgutil.resolve_name(path)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise RegistryError(
            f"the {what} of {entry} cannot be imported: {type(error).__name__}: {error}",
            where=path,
            mend=f"`python -c 'import {path.partition(':')[0]}'` shows the traceback; reinstall {entry.distribution}",
        ) from error
