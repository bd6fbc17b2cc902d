"""Running a suite by pytest in this process, for commands that are not pytest's own."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from sdk.conformance.plugin import SESSION

if TYPE_CHECKING:
    from sdk.conformance.base import Session


@attrs.frozen
class TestOutcome:
    """One test. `detail`: of one that did not pass, the first line of why."""

    name: str
    passed: bool
    detail: str = ""


def run_suite(source: str, session: Session | None = None, arguments: Sequence[str] = ()) -> list[TestOutcome]:
    """The tests of a module, in a session that knows no other plugin of pytest's and no file of the caller's. What
    they print goes to stderr.

    Args:
        source: of the module: imports a suite, and has a subclass of it.
        session: of ranks and models; the kit's own where there is none.
        arguments: of pytest.

    Returns:
        an outcome for each test that ran, and one that failed where the tests could not be run.
    """
    import pytest

    outcomes = _Outcomes(session)
    with tempfile.TemporaryDirectory() as folder, _no_other_plugins(), contextlib.redirect_stdout(sys.stderr):
        # A module name that no other has: pytest leaves it in sys.modules.
        file = Path(folder) / f"test_suite_{abs(hash((source, folder))):x}.py"
        file.write_text(source)
        alone = ["-c", os.devnull, "--rootdir", folder, "-p", "sdk.conformance.plugin", "--import-mode", "importlib"]
        quiet = ["-p", "no:cacheprovider", "-p", "no:terminal"]
        status = pytest.main([*alone, *quiet, *arguments, str(file)], plugins=[outcomes])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or not outcomes.found:
        detail = f"the tests could not be run (pytest's exit status {int(status)})"
        outcomes.found.append(TestOutcome("test_the_tests_can_be_run", False, detail))
    return outcomes.found


class _Outcomes:
    """What pytest tells of each test."""

    def __init__(self, session: Session | None) -> None:
        self._session = session
        self.found: list[TestOutcome] = []

    def pytest_configure(self, config: Any) -> None:
        if self._session is not None:
            config.stash[SESSION] = self._session

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or not report.passed:
            name = report.location[2].rpartition(".")[2]
            self.found.append(TestOutcome(name, report.passed, "" if report.passed else _first_line(report)))


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
