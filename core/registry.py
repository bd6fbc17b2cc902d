"""Choosing a backend by name. The registry finds it; the backend itself plans, builds and checks."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from core._plugins.backend import RUN_TIME, Backend, Choice, Entry, Status, installed_version, named, with_needs
from core._plugins.discovery import discover
from core._plugins.shadow import hidden_packages
from core.errors import RegistryError, did_you_mean
from core.manifest import KINDS, Kind, Manifest

if TYPE_CHECKING:
    from core._calls.call import DispatchMode

__all__ = ["RUN_TIME", "Backend", "Choice", "EngineRegistry", "Entry", "Status", "hidden_packages"]


@attrs.define(eq=False)
class EngineRegistry:
    """The backends of a process. `get` and `new` use the process's own registry, which is discovered once."""

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
    ) -> Backend:
        """`find` in the process's own registry."""
        return cls.default().find(name, kind, model_type, device, vendor)

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
        """`find` in the process's own registry, then `Backend.build`. Imports no other backend.

        Args:
            config: an instance of the backend's config class, or a mapping of its options.
            expect: what the driver chose; this process must come to the same.

        Raises:
            RegistryError: as `find` and `Backend.build`.
            ConfigError: the options are not the backend's.
        """
        entry = cls.default().find(backend, kind, model_type, device, vendor, expect=expect)
        return entry.build(config, device, model_type)

    def find(
        self,
        name: str,
        kind: Kind = "engine",
        model_type: str | None = None,
        device: str | None = None,
        vendor: str | None = None,
        *,
        expect: Choice | None = None,
        elsewhere: bool = False,
    ) -> Backend:
        """The one usable backend of this name.

        Args:
            name: "backend", "distribution:backend" where two distributions offer the same, or "distribution" where
                that offers one of the kind.
            model_type, device, vendor: what it must offer; None leaves it open. Of a device ("cuda:1") the type counts.
            expect: what another process chose; this one must come to the same.
            elsewhere: it is for workers in another environment, so that what it requires may be missing here.

        Raises:
            RegistryError: unknown, ambiguous, not usable (broken, disabled, ...; its own error is the cause), not for
                what is requested, or not what was chosen.
        """
        try:
            backend = self._find(name, kind, {"model type": model_type, "device": device, "vendor": vendor}, elsewhere)
        except RegistryError as error:
            if expect is None:
                raise
            related = [entry for entry in self.entries if entry.distribution == expect.distribution]
            have = ", ".join(map(str, related)) or f"no distribution {expect.distribution}"
            mends = [entry.mend for entry in related if (entry.kind, entry.name) == (expect.kind, expect.name)]
            raise expect.refusal(have, *mends[:1]) from error
        if expect is not None:
            backend.check(expect)
        return backend

    def named(self, name: str, kind: Kind | None = None) -> list[Entry]:
        """All that `name` means, whatever its status: "backend", "distribution:backend", or "distribution".

        Args:
            kind: only backends of it, and plugins that came to no manifest.

        Raises:
            RegistryError: nothing has the name; the nearest ones.
        """
        entries = [entry for entry in self.entries if kind is None or entry.kind in (kind, None)]
        if meant := named(entries, name):
            return meant
        kinds = {*KINDS, *(entry.kind for entry in self.entries if entry.kind)}
        if kind is not None and kind not in kinds:
            raise RegistryError(f"there is no kind {kind!r} of backend", mend=did_you_mean(kind, kinds))
        backends = [entry for entry in entries if isinstance(entry, Backend)]
        names = {entry.qualified_name if ":" in name else entry.name for entry in backends}
        have = ", ".join(sorted(names)) or "none"
        if silent := [entry for entry in entries if not isinstance(entry, Backend)]:
            have += f" (without manifests: {', '.join(map(str, silent))})"
        if others := named(self.entries, name):
            mend = f"it is a {others[0].kind}: ask with kind={others[0].kind!r}"
        elif known_names := names if kind else names.union(*((entry.name, entry.distribution) for entry in entries)):
            mend = did_you_mean(name, known_names)
        else:
            mend = "install a plugin that offers it; `python -m core.list_engines` says what is there"
        what = f"there is no {kind} {name!r}" if kind else f"no plugin {name!r} is installed"
        raise RegistryError(what, have=have, mend=mend)

    def register(self, manifest: Manifest) -> Backend:
        """Offer a backend that no distribution has, as long as the process lives: for notebooks and tests.

        The manifest may hold objects in place of paths (`factory=MyEngine`). It is listed as of the distribution
        "run-time", and takes the place of one that was registered before with its kind and name.

        What the process's own registry has so goes along to the workers of each Ray group that is started afterwards.
        Objects in modules go by name, those of a notebook or script by value. Where one cannot be pickled, or its
        module is not there, workers refuse it with the reason.
        """
        backend = Backend(manifest.name, manifest.kind, Status.OK, RUN_TIME, "", "", manifest=manifest)
        backend = with_needs(backend, installed_version)
        self.add(backend)
        return backend

    def add(self, entry: Entry) -> None:
        """Have an entry at its place in the order; it takes the place of one of its kind, name and distribution."""
        others = [each for each in self.entries if each.place != entry.place]
        self.entries = tuple(sorted([*others, entry], key=lambda each: each.place))

    def unregister(self, backend: Backend) -> None:
        """Take back what `register` gave. Groups that have started keep it."""
        self.entries = tuple(entry for entry in self.entries if entry != backend)

    @property
    def registered(self) -> tuple[Backend, ...]:
        """What was registered at run time."""
        backends = (entry for entry in self.entries if isinstance(entry, Backend))
        return tuple(backend for backend in backends if backend.distribution == RUN_TIME)

    def dispatch_mode(self, name: str) -> DispatchMode:
        """The mode that a plugin offers under this name, by a manifest of kind "dispatch_mode".

        Raises:
            RegistryError: as `find`, or what the plugin names is no DispatchMode.
        """
        from core._calls.call import DispatchMode

        mode = self.find(name, "dispatch_mode").load("factory")
        if not isinstance(mode, DispatchMode):
            raise RegistryError(f"the dispatch mode {name!r} is no DispatchMode", have=repr(mode))
        return mode

    def _find(self, name: str, kind: Kind, request: Mapping[str, str | None], elsewhere: bool) -> Backend:
        entries = self.named(name, kind)
        backends = [entry for entry in entries if isinstance(entry, Backend)]
        if not backends:
            raise entries[0].refusal(name)
        lacks = [_lacks(backend.manifest, request) for backend in backends]
        fitting = [backend for backend, lack in zip(backends, lacks, strict=True) if not lack]
        if not fitting:
            raise RegistryError(
                f"{kind} {name!r} is not for {lacks[0]}",
                want="; or ".join(_offers(backend.manifest) for backend in backends),
                where=", ".join(map(str, backends)),
                mend="ask for what it offers, or choose another backend",
            )
        if len(fitting) > 1:
            names = sorted({backend.qualified_name for backend in fitting})
            offers = "; or ".join(_offers(backend.manifest) for backend in fitting)
            raise RegistryError(
                f"{kind} {name!r} is ambiguous",
                have=", ".join(map(str, fitting)),
                mend=f"ask for {' or '.join(names)}" if len(names) > 1 else f"ask for one of: {offers}",
            )
        (backend,) = fitting
        if backend.status is not Status.OK and not (elsewhere and backend.status is Status.MISSING_DEPENDENCY):
            raise backend.refusal(name)
        return backend


@functools.cache
def _default() -> EngineRegistry:
    return EngineRegistry.discover()


def _sets(manifest: Manifest) -> dict[str, frozenset[str]]:
    return {"model type": manifest.model_types, "device": manifest.devices, "vendor": manifest.vendors}


def _lacks(manifest: Manifest, request: Mapping[str, str | None]) -> str:
    """What is requested and not offered, in words; "" when all is. Without vendors it is for any."""
    types = {what: value.partition(":")[0] for what, value in request.items() if value}
    sets = _sets(manifest)
    return ", ".join(
        f"{what} {value!r}"
        for what, value in types.items()
        if value not in sets[what] and (sets[what] or what != "vendor")
    )


def _offers(manifest: Manifest) -> str:
    return ", ".join(f"{what} {' or '.join(sorted(has)) or 'any'}" for what, has in _sets(manifest).items())
