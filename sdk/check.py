"""`python -m sdk check NAME`: whether what a plugin says of itself is true, in seconds.

These are the kit's tests of the manifest (sdk/conformance/suites/manifest.py), run by pytest in this process, with an
outcome for each that needs no knowledge of pytest.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core.errors import Refused
from core.registry import Backend, EngineRegistry, Entry
from sdk.doctor.checks import Finding

# By kind. Others have no suite yet.
SUITES = {
    "engine": "ManifestSuite",
    "rollout": "ManifestSuite",
    "transfer": "ManifestSuite",
    "dispatch_mode": "ListedSuite",
}
SUITE = """
from sdk.conformance.suites.manifest import {suite}

class TestManifest({suite}):
    kind = {kind!r}
    backend = {backend!r}
"""


def check(name: str) -> Iterator[Finding]:
    """One finding a test, of each engine, rollout, transfer and dispatch mode that the name means.

    Args:
        name: "backend", "distribution:backend" or "distribution".

    Raises:
        RegistryError: no plugin has the name.
        Refused: pytest is not installed.
    """
    entries = EngineRegistry.default().named(name)
    if importlib.util.find_spec("pytest") is None:
        raise Refused("the conformance kit runs on pytest, which is not installed", mend="pip install pytest")
    for entry in entries:
        if not isinstance(entry, Backend):
            yield Finding(entry.name, "problem", f"is {entry.status}: {entry.reason}", entry.mend)
        elif entry.kind in SUITES:
            yield from _run(entry)
        else:
            yield Finding(f"{entry.kind} {entry.name}", "ok", f"is {entry.status}; the kit has no tests of this kind")


def _run(entry: Entry) -> list[Finding]:
    """The suite on one backend, in a session that knows no other plugin of pytest's and no file of the caller's."""
    import pytest

    outcomes = _Outcomes(f"{entry.kind} {entry.name}")
    with tempfile.TemporaryDirectory() as folder, _no_other_plugins(), contextlib.redirect_stdout(sys.stderr):
        # A module name that no other has: pytest leaves it in sys.modules.
        file = Path(folder) / f"test_manifest_of_{abs(hash(entry)):x}.py"
        file.write_text(SUITE.format(suite=SUITES[str(entry.kind)], kind=entry.kind, backend=entry.qualified_name))
        alone = ["-c", os.devnull, "--rootdir", folder, "-p", "sdk.conformance.plugin", "--import-mode", "importlib"]
        quiet = ["-p", "no:cacheprovider", "-p", "no:terminal"]
        status = pytest.main([*alone, *quiet, str(file)], plugins=[outcomes])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or not outcomes.found:
        detail = f"the tests could not be run (pytest's exit status {int(status)})"
        outcomes.found.append(Finding(outcomes.about, "problem", detail, "run the plugin's own tests with pytest"))
    return outcomes.found


class _Outcomes:
    """What pytest tells of each test, as findings."""

    def __init__(self, about: str) -> None:
        self.about = about
        self.found: list[Finding] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.passed:
            return
        sentence = report.location[2].rpartition(".")[2].removeprefix("test_").replace("_", " ")
        detail = "" if report.passed else _first_line(report)
        self.found.append(Finding(f"{self.about}: {sentence}", "ok" if report.passed else "problem", detail))


def _first_line(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message if crash else report.longrepr).strip()
    return text.splitlines()[0] if text else "failed"


@contextlib.contextmanager
def _no_other_plugins() -> Iterator[None]:
    name = "PYTEST_DISABLE_PLUGIN_AUTOLOAD"
    before = {key: os.environ.pop(key, None) for key in (name, "PYTEST_ADDOPTS", "PYTEST_PLUGINS")}
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        os.environ.update({key: value for key, value in before.items() if value is not None})
