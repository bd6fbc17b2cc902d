"""Finding plugins: which distributions offer entry points of ours, and what became of each of them.

The loop is our own, since pluggy's loader stops at the first plugin that raises. Here each entry point is imported and
called by itself, and whatever it does (raise, exit, give nonsense) becomes the status of that one entry.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import Distribution, EntryPoint
from typing import Any

import attrs
import pluggy
from packaging.utils import canonicalize_name

from core import hookspecs
from core._plugins.backend import Backend, Entry, Status, installed_version, with_needs
from core._plugins.shadow import hidden_packages, intruder
from core.errors import RegistryError, did_you_mean
from core.hookspecs import API_VERSION, ENTRY_POINT_GROUP, PROJECT
from core.manifest import Manifest

PLUGINS_VARIABLE = "MANYMESH_PLUGINS"
_GROUP = re.compile(rf"{PROJECT}\.v(\d+)")


def discover(env: Mapping[str, str]) -> tuple[Entry, ...]:
    """All entries of this process's sys.path, ordered by name, kind and distribution.

    Args:
        env: where MANYMESH_PLUGINS is looked up: distribution names with commas between; unset: all, empty: none.
    """
    limit = env.get(PLUGINS_VARIABLE)
    names = None if limit is None else {canonicalize_name(n.strip()) for n in limit.split(",") if n.strip()}
    version_of = functools.cache(installed_version)
    entries = [
        Entry(
            package,
            None,
            Status.SHADOWED,
            PROJECT,
            version_of(PROJECT) or "",
            package,
            error.message,
            error.mend,
            error,
        )
        for package, error in hidden_packages().items()
    ]
    plugins = {plugin.name: plugin for plugin in _plugins()}
    for plugin in plugins.values():
        entries += _entries(plugin, names is None or plugin.name in names, version_of)
    for name in (names or set()) - plugins.keys():
        reason = f"{PLUGINS_VARIABLE} names it, but no plugin of this name is installed"
        entries.append(Entry(name, None, Status.BROKEN, name, "", "", reason, did_you_mean(name, plugins)))
    return tuple(sorted(entries, key=lambda entry: entry.place))


@attrs.frozen
class _Plugin:
    """A distribution that has an entry point of any of our groups."""

    name: str
    version: str
    installed: Distribution

    def entry(self, status: Status, point: EntryPoint | None = None, **more: Any) -> Entry:
        name, module = (point.name, point.value) if point else (self.name, "")
        return Entry(name, None, status, self.name, self.version, module, **more)


def _plugins() -> Iterator[_Plugin]:
    """Those on sys.path, each name once.

    Most distributions have no entry point of ours, and their METADATA (much the longest file) is not read. Of several
    of one name the first on sys.path counts, as for importlib, even if that one has no entry point of ours.
    """
    names = set()
    for distribution in importlib.metadata.distributions():
        try:
            if not _GROUP.search(distribution.read_text("entry_points.txt") or ""):
                continue
            metadata = distribution.metadata
            name = canonicalize_name(metadata["Name"])
            first = importlib.metadata.distribution(name)
        except Exception:
            continue  # not an installed distribution: a leftover without METADATA, a file that is not text
        if name not in names and first.locate_file("") == distribution.locate_file(""):
            names.add(name)
            yield _Plugin(name, metadata["Version"] or "", distribution)


def _entries(plugin: _Plugin, is_allowed: bool, version_of: Callable[[str], str | None]) -> list[Entry]:
    """What became of one distribution's entry points."""
    try:
        points = [point for point in plugin.installed.entry_points if _GROUP.fullmatch(point.group)]
    except Exception as error:
        reason, mend = f"entry_points.txt cannot be read: {_text_of(error)}", f"reinstall {plugin.name}"
        return [plugin.entry(Status.BROKEN, reason=reason, mend=mend, error=error)]
    if not is_allowed:
        mend = f"add {plugin.name} to {PLUGINS_VARIABLE}, or unset it"
        why = {"reason": f"{PLUGINS_VARIABLE} leaves it out", "mend": mend}
        return [plugin.entry(Status.DISABLED, point, **why) for point in points]
    ours = [point for point in points if point.group == ENTRY_POINT_GROUP]
    if not ours:  # one that also offers our version is at home with several
        return [plugin.entry(Status.INCOMPATIBLE, point, **_speaks(point, plugin.name)) for point in points]

    return [entry for point in ours for entry in _ask(plugin, point, version_of)]


def _ask(plugin: _Plugin, point: EntryPoint, version_of: Callable[[str], str | None]) -> list[Entry]:
    """What became of one entry point: a backend or several, or the reason why there is none."""
    try:
        if path := intruder(point.module.partition(".")[0], plugin.installed):
            reason = f"{path} would be imported, which is not part of {plugin.name}"
            mend = f"rename {path}, or take its folder off sys.path"
            return [plugin.entry(Status.SHADOWED, point, reason=reason, mend=mend)]
        return [
            with_needs(
                Backend(each.name, each.kind, Status.OK, plugin.name, plugin.version, point.value, manifest=each),
                version_of,
            )
            for each in _manifests(point)
        ]
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit too, and whatever an extension module makes of a panic
        mend = _mend_import(error, point, plugin.name)
        return [plugin.entry(Status.BROKEN, point, reason=_text_of(error), mend=mend, error=error)]


def _manifests(point: EntryPoint) -> list[Manifest]:
    """Import an entry point's module and ask it. A manager of its own: nobody else's hook or wrapper takes part."""
    plugin = point.load()
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(plugin)
    manager.check_pending()  # a hook whose name is misspelt would never be called
    manifests = [manifest for result in manager.hook.manymesh_manifests() for manifest in result]
    for manifest in manifests:
        if not isinstance(manifest, Manifest):
            raise RegistryError(f"its hook gives a {type(manifest).__name__}, not a Manifest", have=manifest)
        if not all(isinstance(path, str | None) for path in (manifest.factory, manifest.config, manifest.planner)):
            raise RegistryError("its manifest holds objects", have=manifest, want="their paths, 'module:object'")
    if not manifests:
        raise RegistryError("it offers no manifest", want="a function manymesh_manifests marked with hookimpl")
    return manifests


def _speaks(point: EntryPoint, distribution: str) -> dict[str, str]:
    theirs = int(point.group.rpartition("v")[2])
    mend = f"pip install --upgrade {distribution if theirs < API_VERSION else PROJECT}"
    return {"reason": f"speaks plugin API {theirs}, this core speaks {API_VERSION}", "mend": mend}


def _mend_import(error: BaseException, point: EntryPoint, distribution: str) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        top = error.name.partition(".")[0]
        if top != point.module.partition(".")[0]:
            return f"install what provides the module {top!r}, or pip uninstall {distribution}"
    return f"`python -m core.list_engines --verbose` shows the traceback; mend, upgrade or uninstall {distribution}"


def _text_of(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "(its text cannot be shown)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
