"""pytest's side of the kit: tests that are closed, expected failures, the score and the report.

pytest loads this in every session (entry point `pytest11`), so it imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from sdk.conformance.base import Conformance, Session

pytest.register_assert_rewrite("sdk.conformance.suites")
REPORT = pytest.StashKey[Any]()  # a report.Report
SESSION = pytest.StashKey[Any]()  # a base.Session, of a session around this one


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("manymesh").addoption(
        "--conformance-report",
        action="append",
        default=[],
        metavar="FILE",
        help="write what the conformance suites found, as JSON (.json) or Markdown (.md); may be given twice",
    )


def pytest_configure(config: pytest.Config) -> None:
    from sdk.conformance.report import Report

    config.stash[REPORT] = Report()
    for file in config.getoption("--conformance-report"):
        if Path(file).suffix not in (".json", ".md"):
            raise pytest.UsageError(f"--conformance-report {file}: want a file that ends in .json or .md")


def suite_of(item: Any) -> type[Conformance] | None:
    """The suite that a test belongs to. Where nobody imported the base, there is none."""
    import sys

    base = sys.modules.get("sdk.conformance.base")
    cls = getattr(item, "cls", None)
    return cls if base is not None and cls is not None and issubclass(cls, base.Conformance) else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    suite = suite_of(metafunc)
    if suite is not None and "world_size" in metafunc.fixturenames:
        must_resolve(suite)
        metafunc.parametrize("world_size", suite.worlds_used(), ids=lambda size: f"world {size}")


@pytest.hookimpl(trylast=True)  # what -k and -m leave out is not ours to count
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    open_items: list[pytest.Item] = []
    closed_items: list[pytest.Item] = []
    for item in items:
        suite = suite_of(item)
        if suite is None:
            open_items.append(item)
            continue
        must_resolve(suite)
        reasons = config.stash[REPORT].collected(suite, item)
        (closed_items if reasons else open_items).append(item)
        expect_failure(suite, item, closed=reasons)
    if closed_items:
        items[:] = open_items
        config.hook.pytest_deselected(items=closed_items)


def must_resolve(suite: type[Conformance]) -> None:
    """Raises UsageError where the registry has no such backend, or one that cannot be used."""
    from core.errors import RegistryError

    try:
        suite.entry()
    except RegistryError as error:
        raise pytest.UsageError(f"{suite.__module__}.{suite.__qualname__}: {error}") from error


def expect_failure(suite: type[Conformance], item: Any, closed: str) -> None:
    """Mark a test that the adopter expects to fail. What is expected of no test, or of a closed one, is stale."""
    where = f"{suite.__module__}.{suite.__qualname__}.expected_failures"
    for name in suite.expected_failures:
        if not hasattr(suite, name.partition("[")[0]):
            raise pytest.UsageError(f"{where}: the suite has no test {name!r}; remove it")
    names = [name for name in (item.name, item.originalname) if name in suite.expected_failures]
    if not names:
        return
    if closed:
        raise pytest.UsageError(f"{where}: {names[0]} is closed ({closed}); remove it")
    item.add_marker(pytest.mark.xfail(reason=suite.expected_failures[names[0]], strict=True))


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of pytest's own, which knows of expected failures
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Any:
    report = yield
    suite = suite_of(item)
    if suite is not None:
        item.config.stash[REPORT].ran(suite, item, report)
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    report = config.stash[REPORT]
    if not report.suites or config.option.collectonly:
        return
    terminalreporter.section("conformance")
    for line in report.lines():
        terminalreporter.write_line(line)


def pytest_sessionfinish(session: pytest.Session) -> None:
    for file in session.config.getoption("--conformance-report"):
        session.config.stash[REPORT].write(Path(file))


@pytest.fixture(scope="session")
def conformance_session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """Worlds of ranks, models and results that the suites of a session share."""
    from sdk.conformance.base import Session
    from sdk.testing import Worlds

    if (outer := request.config.stash.get(SESSION, None)) is not None:  # a session within a session
        yield outer
        return
    with closing(Worlds(timeout_s=600)) as worlds:  # pytest's own limit is for the tests
        yield Session(worlds, tmp_path_factory.mktemp)
