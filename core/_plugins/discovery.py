"""Finding plugins: which distributions offer entry points of ours, and what became of each of them.

The loop is our own, since pluggy's loader stops at the first plugin that raises. Here each entry point is imported and
asked by itself, and whatever it does (raise, exit, give nonsense) becomes the status of that one entry.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError
from pathlib import Path
from typing import Any

import attrs
import pluggy
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from core import hookspecs
from core.errors import RegistryError, did_you_mean
from core.hookspecs import API_VERSION, ENTRY_POINT_GROUP, PROJECT
from core.manifest import Kind, Manifest

PLUGINS_VARIABLE = "MANYMESH_PLUGINS"
_GROUP = re.compile(rf"{PROJECT}\.v(\d+)")


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
        return f"{self.kind} {self.name!r} of {self.distribution} {self.version}"


@attrs.frozen
class Entry:
    """One backend, or one entry point that came to no manifest.

    Attributes:
        name, kind: of the manifest; without one, the entry point's name, and None.
        distribution, version: who offers it. Names are normalised (`my-engine`); the version is "" where there is none.
        reason, mend: why it cannot be used, and what to do about it; "" when ok.
        module: the entry point's value.
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
    manifest: Manifest | None = attrs.field(default=None, repr=False)
    error: BaseException | None = attrs.field(default=None, repr=False, eq=False)

    @property
    def choice(self) -> Choice | None:
        """None without a manifest."""
        return Choice(self.kind, self.name, self.distribution, self.version) if self.kind else None

    def __str__(self) -> str:
        text = f"{self.kind or 'plugin'} {self.name!r} of {self.distribution} {self.version}".rstrip()
        return text if self.status is Status.OK else f"{text} ({self.status}: {self.reason})"


def discover(env: Mapping[str, str]) -> tuple[Entry, ...]:
    """All entries of this process's sys.path, ordered by name, kind and distribution.

    Args:
        env: where MANYMESH_PLUGINS is looked up: distribution names with commas between; unset: all, empty: none.
    """
    limit = env.get(PLUGINS_VARIABLE)
    allowed = None if limit is None else {canonicalize_name(n.strip()) for n in limit.split(",") if n.strip()}
    version_of = functools.cache(_version_of)
    entries = []
    try:
        check_core()
    except RegistryError as error:
        blank = Entry("core", None, Status.SHADOWED, PROJECT, version_of(PROJECT) or "", "core")
        entries.append(attrs.evolve(blank, reason=error.message, mend=error.mend, error=error))
    plugins = {plugin.name: plugin for plugin in _plugins()}
    for plugin in plugins.values():
        entries += _entries(plugin, allowed is None or plugin.name in allowed, version_of)
    for name in (allowed or set()) - plugins.keys():
        reason = f"{PLUGINS_VARIABLE} names it, but no plugin of this name is installed"
        entries.append(Entry(name, None, Status.BROKEN, name, "", "", reason, did_you_mean(name, plugins)))
    return tuple(sorted(entries, key=lambda e: (e.name, e.kind or "", e.distribution)))


@attrs.frozen
class _Plugin:
    """A distribution that has an entry point of any of our groups."""

    name: str
    version: str
    found: Distribution

    def entry(self, status: Status, point: EntryPoint | None = None, **more: Any) -> Entry:
        name, module = (point.name, point.value) if point else (self.name, "")
        return Entry(name, None, status, self.name, self.version, module, **more)


def _plugins() -> Iterator[_Plugin]:
    """Those on sys.path, each name once.

    Most distributions have no entry point of ours, and their METADATA (much the longest file) is not read. Of several
    of one name the first on sys.path counts, as for importlib, even if that one has no entry point of ours.
    """
    seen = set()
    for found in importlib.metadata.distributions():
        try:
            if not _GROUP.search(found.read_text("entry_points.txt") or ""):
                continue
            metadata = found.metadata
            name = canonicalize_name(metadata["Name"])
            first = importlib.metadata.distribution(name)
        except Exception:
            continue  # not an installed distribution: a leftover without METADATA, a file that is not text
        if name not in seen and first.locate_file("") == found.locate_file(""):
            seen.add(name)
            yield _Plugin(name, metadata["Version"] or "", found)


def _entries(plugin: _Plugin, allowed: bool, version_of: Callable[[str], str | None]) -> list[Entry]:
    """What became of one distribution's entry points."""
    try:
        points = [point for point in plugin.found.entry_points if _GROUP.fullmatch(point.group)]
    except Exception as error:
        said, mend = f"entry_points.txt cannot be read: {_said(error)}", f"reinstall {plugin.name}"
        return [plugin.entry(Status.BROKEN, reason=said, mend=mend, error=error)]
    if not allowed:
        mend = f"add {plugin.name} to {PLUGINS_VARIABLE}, or unset it"
        why = {"reason": f"{PLUGINS_VARIABLE} leaves it out", "mend": mend}
        return [plugin.entry(Status.DISABLED, point, **why) for point in points]
    ours = [point for point in points if point.group == ENTRY_POINT_GROUP]
    if not ours:  # one that also offers our version is at home with several
        return [plugin.entry(Status.INCOMPATIBLE, point, **_speaks(point, plugin.name)) for point in points]

    return [entry for point in ours for entry in _ask(plugin, point, version_of)]


def _ask(plugin: _Plugin, point: EntryPoint, version_of: Callable[[str], str | None]) -> list[Entry]:
    """What became of one entry point: a manifest or several, or the reason why there is none."""
    try:
        if intruder := _intruder(point.module.partition(".")[0], plugin.found):
            reason = f"{intruder} would be imported, which is not part of {plugin.name}"
            mend = f"rename {intruder}, or take its folder off sys.path"
            return [plugin.entry(Status.SHADOWED, point, reason=reason, mend=mend)]
        backends = [(manifest, _missing(manifest, version_of)) for manifest in _manifests(point)]
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit too, and whatever an extension module makes of a panic
        mend = _mend_import(error, point, plugin.name)
        return [plugin.entry(Status.BROKEN, point, reason=_said(error), mend=mend, error=error)]
    entries = []
    for manifest, missing in backends:
        status = Status.MISSING_DEPENDENCY if missing else Status.OK
        reason, mend = missing or ("", "")
        entry = plugin.entry(status, point, reason=reason, mend=mend, manifest=manifest)
        entries.append(attrs.evolve(entry, name=manifest.name, kind=manifest.kind))
    return entries


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
    if not manifests:
        raise RegistryError("it offers no manifest", want="a function manymesh_manifests marked with hookimpl")
    return manifests


def requirements(
    manifest: Manifest, version_of: Callable[[str], str | None] | None = None
) -> Iterator[tuple[tuple[str, ...], dict[str, str | None], bool]]:
    """Of each group that a manifest requires: the alternatives, what is installed of them, and whether one is met.
    Those of a backend with an environment of its own are checked there, by pip."""
    version_of = version_of or _version_of
    for group in manifest.requires:
        wanted = [Requirement(text) for text in group]
        met = manifest.env is not None or any(_is_met(one, version_of) for one in wanted)
        yield tuple(group), {one.name: version_of(one.name) for one in wanted}, met


def _missing(manifest: Manifest, version_of: Callable[[str], str | None]) -> tuple[str, str] | None:
    """Reason and mend when requirements are not met."""
    unmet = [(group, have) for group, have, met in requirements(manifest, version_of) if not met]
    reasons = [
        f"needs {' or '.join(group)}: " + ", ".join(f"{n} is {v or 'not installed'}" for n, v in have.items())
        for group, have in unmet
    ]
    installs = " ".join(shlex.quote(group[0]) for group, _ in unmet)
    return ("; ".join(reasons), f"pip install {installs}") if unmet else None


def _is_met(wanted: Requirement, version_of: Callable[[str], str | None]) -> bool:
    if wanted.marker is not None and not wanted.marker.evaluate():
        return True
    have = version_of(wanted.name)
    # A nightly build that is installed was installed on purpose.
    return have is not None and wanted.specifier.contains(have, prereleases=True)


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except PackageNotFoundError:
        return None


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


def _said(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "(its text cannot be shown)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def check_core() -> None:
    """See that `core` is the installed distribution's own, and not another folder of that name that comes first.

    Without an installed distribution (a bare checkout) there is nothing to compare with.

    Raises:
        RegistryError: naming the intruder.
    """
    try:
        installed = importlib.metadata.distribution(PROJECT)
    except PackageNotFoundError:
        return
    if intruder := _intruder("core", installed):
        raise RegistryError(
            f"{intruder} is imported, which is not part of the installed {PROJECT} {installed.version}",
            have=str(intruder),
            want=" or ".join(str(home / "core") for home in _homes(installed)[0]),
            mend=f"rename {intruder}, or take its folder off sys.path",
        )


def _intruder(top: str, owner: Distribution) -> Path | None:
    """The folder or file that `import top` takes, when it is not the owner's. Imports nothing."""
    spec = importlib.util.find_spec(top)
    if spec is None:
        return None  # not there at all: the import will say so
    # A namespace package has several places, of which one must be the owner's.
    places = [Path(p) for p in spec.submodule_search_locations or (spec.origin or "",)]
    if Path(str(owner.locate_file(""))) in [place.parent for place in places]:
        return None  # the usual case, without a look at the disk
    places = [place for place in places if place.exists()]
    exact, below = _homes(owner)
    # Only folders are resolved: a link to a package inside the owner's folder is the owner's.
    for folder in (place.parent.resolve() for place in places):
        if folder in exact or any(folder.is_relative_to(root) for root in below):
            return None
    return places[0] if places else None


def _homes(owner: Distribution) -> tuple[list[Path], list[Path]]:
    """Folders that hold a distribution's top-level modules, and folders that hold them somewhere below.

    The first is where its metadata lies. Of an editable install also what its .pth files put on sys.path (PEP 660), or
    where they name an import hook instead, the project that was installed.
    """
    site = Path(str(owner.locate_file(""))).resolve()
    origin = json.loads(owner.read_text("direct_url.json") or "{}")
    if not origin.get("dir_info", {}).get("editable"):
        return [site], []
    lines = [
        line
        for file in owner.files or ()
        if file.suffix == ".pth" and Path(str(file.locate())).is_file()
        for line in file.read_text().splitlines()
    ]
    folders = [(site / line).resolve() for line in lines if line.strip() and not line.startswith(("import", "#"))]
    if folders:
        return [site, *folders], []
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    return [site], [Path(url2pathname(urlsplit(origin["url"]).path)).resolve()]
