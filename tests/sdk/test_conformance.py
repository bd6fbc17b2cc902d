"""The kit's own rules: tests open by capability, expected failures go stale, a score, reports; and it bites."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sdk.conformance import EngineConformance
from sdk.conformance.base import Session
from sdk.conformance.plugin import REPORT, must_resolve
from sdk.conformance.report import SuiteResult
from tests.sdk.kit import mutants
from tests.sdk.kit.faults import Fault, Mutant, caught_by, entry_fault, mutants_in

ROOT = Path(__file__).parents[2]
SUITE = """
import pytest
from core.manifest import Capability
from core.registry import EngineRegistry
from sdk.conformance.base import Conformance, absent, offered

class Suite(Conformance):
    kind = "engine"

    def test_that_holds(self): pass
    def test_that_fails(self): assert {fails} == 2, "the reason"
    @offered(Capability.RESHARD)
    def test_of_what_is_offered(self): pass
    @absent(Capability.RESHARD)
    def test_of_what_is_absent(self): pass
    @offered(Capability.ADAPTER)
    def test_of_adapters(self): raise AssertionError("closed")
    @pytest.mark.parametrize("n", [1, 2])
    def test_of_two(self, n): assert n == 1 or {fails} == 2

class TestMine(Suite):
    backend = "fsdp"
    expected_failures = {expected}
"""


class Recorder:
    def __init__(self) -> None:
        self.report: Any = None

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.report = session.config.stash[REPORT]


def run(directory: Path, expected: dict[str, str], fails: int, *options: str) -> tuple[int, SuiteResult | None]:
    """A session of its own, within this one."""
    file = directory / f"test_{abs(hash(directory))}.py"  # modules are cached by name
    file.write_text(SUITE.format(expected=expected, fails=fails))
    recorder = Recorder()
    quiet = ["-p", "no:terminal", "-p", "no:cacheprovider", "-p", "no:faulthandler", "-p", "no:timeout"]
    arguments = [str(file), *quiet, "-c", "/dev/null", "--rootdir", str(directory), "--import-mode=importlib", *options]
    status = pytest.main(arguments, plugins=[recorder])
    suites = list(recorder.report.suites.values()) if recorder.report else []
    return status, suites[0] if suites else None


def test_capabilities_open_and_close_tests_and_the_score_counts_what_had_to_pass(tmp_path: Path) -> None:
    status, result = run(tmp_path, {}, 1)
    assert status == pytest.ExitCode.TESTS_FAILED
    assert result is not None
    assert {test.name: test.outcome for test in result.tests.values()} == {
        "test_that_holds": "passed",
        "test_that_fails": "failed",
        "test_of_what_is_offered": "passed",
        "test_of_what_is_absent": "closed",
        "test_of_adapters": "closed",
        "test_of_two[1]": "passed",
        "test_of_two[2]": "failed",
    }
    assert result.tests["test_of_adapters"].reason == "adapter not offered"
    assert "the reason" in result.tests["test_that_fails"].reason
    assert re.fullmatch(r"conformance fsdp \S+: 3 passed, 2 failed, 2 closed by capabilities; score 3/5", result.line())
    assert result.capabilities()["reshard"] == {"offered": True, "tests": {"passed": 1}}
    assert result.capabilities()["adapter"] == {"offered": False, "tests": {}}


def test_an_expected_failure_is_no_failure_and_has_its_reason_in_the_line(tmp_path: Path) -> None:
    status, result = run(tmp_path, {"test_that_fails": "why", "test_of_two[2]": "why"}, 1)
    assert status == pytest.ExitCode.OK
    assert result is not None
    assert result.line().endswith(": 3 passed, 2 expected failures (why), 2 closed by capabilities; score 3/3")


@pytest.mark.parametrize(
    ("expected", "stale"),
    [
        ({"test_that_fails": "mended since"}, None),
        ({"test_that_never_was": "why"}, "has no test 'test_that_never_was'"),
        ({"test_of_adapters": "why"}, "is closed"),
    ],
    ids=["it passes", "no such test", "it is closed"],
)
def test_an_expected_failure_that_is_stale_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], expected: dict[str, str], stale: str | None
) -> None:
    status, result = run(tmp_path, expected, 2)
    if stale is None:
        assert status == pytest.ExitCode.TESTS_FAILED
        assert result is not None
        assert result.tests["test_that_fails"].outcome == "failed"
        assert "mended since" in result.tests["test_that_fails"].reason
    else:
        assert status == pytest.ExitCode.USAGE_ERROR
        assert stale in capsys.readouterr().err


def test_reports_are_json_and_markdown_by_suffix(tmp_path: Path) -> None:
    files = [tmp_path / "out" / "report.json", tmp_path / "report.md"]
    run(tmp_path, {}, 1, *(f"--conformance-report={file}" for file in files))
    data = json.loads(files[0].read_text())
    (suite,) = data["suites"]
    assert (data["schema"], suite["backend"], suite["score"], suite["closed"]) == (1, "fsdp", "3/5", 2)
    assert {"name", "outcome", "reason", "seconds", "capabilities"} == set(suite["tests"][0])
    assert "| reshard | offered | 1 passed |" in files[1].read_text()
    assert "| `test_of_adapters` | closed | adapter not offered |" in files[1].read_text()


def test_what_pytest_loads_in_every_session_imports_nothing_heavy() -> None:
    code = "import sys, sdk.conformance.plugin; print(sorted({'torch', 'ray', 'transformers'} & set(sys.modules)))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"


# A few of each kind here; all of them in the slow set.
FEW = ("averages the gradient over dp ranks", "has one dp rank collected twice", "imports torch in its manifest")
MORE = (
    "exports q as k, and gate as up",
    "forgets the schedule in its checkpoint",
    "leaks a process group",
    "moves to CPU, which its manifest doesn't offer",
)


@pytest.mark.parametrize("names", [FEW, pytest.param(MORE, marks=pytest.mark.ci)], ids=["few", "more"])
def test_the_kit_finds_some_faults(conformance_session: Session, names: Sequence[str]) -> None:
    assert mutants.find_misses("engine", conformance_session, only=names) == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_the_kit_finds_every_fault_of_an_engine(conformance_session: Session, backend: str) -> None:
    assert mutants.find_misses("engine", conformance_session, backend=backend) == {}


def test_the_table_of_mutants_in_the_docs_is_of_these_mutants() -> None:
    """It is written by a run (`python -m tests.sdk.kit.mutants --write`), so a mutant may not be missing in it."""
    page = (ROOT / "docs/conformance.md").read_text()
    table = page.partition(mutants.BEGIN)[2].partition(mutants.END)[0]
    rows = set(re.findall(r"^\| (.+?) \| `test", table, re.MULTILINE))
    assert rows == {mutant.name for target in mutants.TARGETS.values() for mutant in target.mutants}


def test_mutants_are_the_faults_of_a_module_that_name_their_tests_in_their_order() -> None:
    module = ModuleType("faults")

    class Base(Fault):
        """is a base of faults"""

    @caught_by("test_a", "test_b")
    class Second(Base):
        """does one thing
        wrong."""

    class Elsewhere(Second):
        """was imported"""

    first = entry_fault("hides a capability", "test_c")(lambda entry: entry)
    untested = Mutant("is sound", ())
    for fault in (Base, Second):
        fault.__module__ = module.__name__
    vars(module).update(first=first, Base=Base, Second=Second, Elsewhere=Elsewhere, untested=untested)
    assert [(mutant.name, mutant.tests) for mutant in mutants_in([module])] == [
        ("hides a capability", ("test_c",)),
        ("does one thing wrong", ("test_a", "test_b")),
    ]


def test_a_backend_that_there_is_not_is_said_with_those_there_are() -> None:
    class TestMistyped(EngineConformance):
        backend = "fsdq"

    with pytest.raises(pytest.UsageError, match=r"TestMistyped: there is no engine 'fsdq'[\s\S]*'fsdp'"):
        must_resolve(TestMistyped)
