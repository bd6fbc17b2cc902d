"""Folders and files that hide an installed package: Python imports the first of a name on sys.path."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path

from core.errors import RegistryError
from core.hookspecs import PROJECT

PACKAGES = ("core", "manymesh", "sdk")  # of our own distribution


def check_packages() -> None:
    """See that our own packages are the installed distribution's, and not other folders of these names.

    Raises:
        RegistryError: naming the intruder.
    """
    for error in hidden_packages().values():
        raise error


def hidden_packages() -> dict[str, RegistryError]:
    """An error for each of our packages that something else hides, by package.

    Without an installed distribution (a bare checkout) there is nothing to compare with.
    """
    try:
        installed = importlib.metadata.distribution(PROJECT)
    except PackageNotFoundError:
        return {}
    intruders = {package: intruder(package, installed) for package in PACKAGES}
    return {
        package: RegistryError(
            f"{path} is imported, which is not part of the installed {PROJECT} {installed.version}",
            have=str(path),
            want=" or ".join(dict.fromkeys(str(home / package) for home in _homes(installed)[0])),
            mend=f"rename {path}, or take its folder off sys.path",
        )
        for package, path in intruders.items()
        if path is not None
    }


def intruder(package: str, owner: Distribution) -> Path | None:
    """The folder or file that `import package` takes, when it is not the owner's. Imports nothing."""
    spec = importlib.util.find_spec(package)
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
