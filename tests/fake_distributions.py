"""Distributions made on the spot: what an installer leaves in site-packages, in a folder of the test's own."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

HEADER = """\
from core.hookspecs import hookimpl
from core.manifest import Manifest

"""


def manifest(name: str, module: str, **more: object) -> str:
    """Source of a Manifest whose factory and config are in `{module}_backend`."""
    fields = {"kind": "engine", "factory": f"{module}_backend:Backend", "config": f"{module}_backend:Config"} | more
    return f"Manifest(name={name!r}, {', '.join(f'{key}={value!r}' for key, value in fields.items())})"


def plugin(*manifests: str) -> str:
    """Source of a plugin's light module."""
    return f"{HEADER}@hookimpl\ndef manymesh_manifests():\n    return [{', '.join(manifests)}]\n"


BACKEND = """\
import attrs

@attrs.frozen
class Config:
    model: str = "tiny"
    learning_rate: float = 0.1

class Backend:
    def __init__(self, config, device):
        self.config, self.device = config, device
"""


def install(
    site: Path,
    distribution: str,
    sources: Mapping[str, str],
    *,
    version: str = "1.0",
    group: str = "manymesh.v1",
    points: Mapping[str, str] | None = None,
    direct_url: str | None = None,
) -> Path:
    """Write modules (by file name below `site`, e.g. "toy.py") and the metadata of a distribution that has them.

    Args:
        points: entry points; by default one, named like the distribution, of the first source's module.
        direct_url: content of direct_url.json.

    Returns:
        the dist-info folder.
    """
    info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    for file, text in sources.items():
        path = site / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if points is None:
        points = {distribution: next(iter(sources)).removesuffix(".py").replace("/", ".")}
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    if direct_url is not None:
        (info / "direct_url.json").write_text(direct_url)
    files = [*sources, *(f"{info.name}/{path.name}" for path in info.iterdir()), f"{info.name}/RECORD"]
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    return info


def forget(folder: Path) -> None:
    """Drop the modules that this process imported from below a folder, so that another test can have their names."""
    for name, module in list(sys.modules.items()):
        if str(folder) in str(getattr(module, "__file__", None)):
            del sys.modules[name]
