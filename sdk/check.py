"""`python -m sdk check NAME`: whether what a plugin says of itself is true, in seconds.

These are the kit's tests of the manifest (sdk/conformance/suites/manifest.py), run by pytest in this process, with an
outcome for each that needs no knowledge of pytest.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

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
    from sdk.conformance.in_process import run_suite

    about = f"{entry.kind} {entry.name}"
    source = SUITE.format(suite=SUITES[str(entry.kind)], kind=entry.kind, backend=entry.qualified_name)
    findings = []
    for test in run_suite(source):
        sentence = test.name.removeprefix("test_").replace("_", " ")
        mend = "run the plugin's own tests with pytest" if test.name == "test_the_tests_can_be_run" else ""
        findings.append(Finding(f"{about}: {sentence}", "ok" if test.passed else "problem", test.detail, mend))
    return findings
