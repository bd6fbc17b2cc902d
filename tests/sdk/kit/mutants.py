"""Runs the suites on backends with a fault in them, to see that each fault is found.

python -m tests.sdk.kit.mutants                                # engine fsdp, rollout hf: a table
python -m tests.sdk.kit.mutants --write docs/conformance.md    # and into the page, between its marks
python -m tests.sdk.kit.mutants --engine megatron --all        # every test on every fault (minutes)
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from sdk.conformance import EngineConformance, ReplicaConformance, RolloutConformance
from sdk.conformance.base import Conformance, Session
from sdk.conformance.plugin import SESSION, suite_of
from tests.sdk.kit import (
    dispatch_mode_faults,
    dispatch_modes,
    engine_faults,
    engine_life_faults,
    manifest_faults,
    rollout_row_faults,
    rollout_score_faults,
    rollout_server_faults,
    rollout_state_faults,
    rollout_weight_faults,
    state_faults,
    transfer_faults,
    worker_faults,
)
from tests.sdk.kit.faults import Mutant, mutants_in, on_mutant

BEGIN = "<!-- mutants: written by `python -m tests.sdk.kit.mutants --write docs/conformance.md` -->"
END = "<!-- mutants: end -->"
MODULE = """\
from tests.sdk.kit import mutants
globals().update(mutants.classes({kind!r}, {backend!r}, {names!r}))
"""


@attrs.define
class Found:
    """What became of a mutant: the tests that failed on it, each with the first line of why, and those that passed."""

    mutant: Mutant
    failed: dict[str, str] = attrs.field(factory=dict)
    passed: list[str] = attrs.field(factory=list)

    @property
    def caught(self) -> bool:
        """Whether a test judged it wrong. A rank that crashed or is gone is no judgement: the fault may have broken
        itself."""
        crashes = ("RuntimeError", "BrokenPipeError", "ConnectionResetError")
        return any(not why.startswith(crashes) for why in self.failed.values())

    @property
    def misses(self) -> list[str]:
        """Of the tests that must find it, those that did not."""
        names = self.mutant.tests
        return [name for name in names if not self.caught or not any(is_named(test, name) for test in self.failed)]


@attrs.frozen
class Target:
    """A suite, a sound backend, and the faults to put into it."""

    suite: type[Conformance]
    backend: str
    mutants: tuple[Mutant, ...]


ENGINE_FAULTS = (engine_faults, engine_life_faults, state_faults, manifest_faults)
ROLLOUT_FAULTS = (
    rollout_row_faults,
    rollout_score_faults,
    rollout_server_faults,
    rollout_state_faults,
    rollout_weight_faults,
    state_faults,
)
TARGETS = {
    "engine": Target(EngineConformance, "fsdp", mutants_in(ENGINE_FAULTS)),
    "rollout": Target(RolloutConformance, "hf", mutants_in(ROLLOUT_FAULTS)),
    "colocated_rollout": Target(worker_faults.ColocatedOnTwo, "hf", worker_faults.COLOCATED),
    "replica": Target(ReplicaConformance, "hf", worker_faults.REPLICAS),
    "dispatch_mode": Target(
        dispatch_modes.Template, dispatch_modes.Template.backend, mutants_in([dispatch_mode_faults])
    ),
    "transfer": Target(transfer_faults.DiskConformance, "disk", mutants_in([transfer_faults])),
}


def classes(kind: str, backend: str, names: Sequence[str]) -> dict[str, type[Conformance]]:
    """A suite for each mutant, by the name that pytest looks for."""
    target = TARGETS[kind]
    numbered = {f"TestMutant{number}": mutant for number, mutant in enumerate(target.mutants) if mutant.name in names}
    return {name: on_mutant(target.suite, backend, mutant, name, __name__) for name, mutant in numbered.items()}


class Collector:
    """pytest's side: keeps the tests that are to find a mutant, shares the outer session's ranks, notes outcomes."""

    def __init__(self, session: Session | None, every: bool) -> None:
        self._session, self._every = session, every
        self.found: dict[str, Found] = {}

    def pytest_configure(self, config: pytest.Config) -> None:
        if self._session is not None:
            config.stash[SESSION] = self._session

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if self._is_kept(item)]

    def _is_kept(self, item: pytest.Item) -> bool:
        mutant = self._mutant(item)
        return self._every or any(is_named(item.name, name) for name in mutant.tests)

    def _mutant(self, item: pytest.Item) -> Mutant:
        mutant: Mutant = suite_of(item).mutant  # type: ignore[union-attr]
        self.found.setdefault(mutant.name, Found(mutant))
        return mutant

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> Any:
        report = yield
        result = self.found[self._mutant(item).name]
        if report.failed:
            from sdk.conformance.report import last_line

            result.failed[item.name] = last_line(report)
        elif report.when == "call":
            result.passed.append(item.name)
        return report


def is_named(item: str, name: str) -> bool:
    """A test by its whole name, or with whatever parameters, or by how its name begins."""
    return item.startswith(name)


def run(
    kind: str, backend: str, mutants: Sequence[Mutant], session: Session | None = None, *, every: bool = False
) -> list[Found]:
    """Run the tests that are named for the mutants (or every test) on each.

    Args:
        session: of a pytest session around this, whose ranks are used then.
    """
    collector = Collector(session, every)
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, f"test_{Path(directory).name}.py")  # a name of its own: modules are cached by it
        file.write_text(MODULE.format(kind=kind, backend=backend, names=[mutant.name for mutant in mutants]))
        quiet = ["-p", "no:terminal", "-p", "no:cacheprovider", "-p", "no:faulthandler", "-p", "no:timeout"]
        options = [*quiet, "-c", "/dev/null", "--rootdir", directory, "--import-mode=importlib", "-W", "ignore"]
        status = pytest.main([str(file), *options], plugins=[collector])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {status!r}")
    for mutant in mutants:
        collector.found.setdefault(mutant.name, Found(mutant))
    return [collector.found[mutant.name] for mutant in mutants]


def find_misses(
    kind: str, session: Session, *, backend: str | None = None, only: Sequence[str] = ()
) -> dict[str, dict[str, list[str]]]:
    """By mutant that was not found: the tests that must find it and did not, and those that failed on it.

    Args:
        only: names of mutants; empty: all of the kind.
    """
    target = TARGETS[kind]
    mutants = {mutant.name: mutant for mutant in target.mutants}
    chosen = [mutants[name] for name in only or mutants]
    results = run(kind, backend or target.backend, chosen, session)
    return {each.mutant.name: {"missed by": each.misses, "found by": [*each.failed]} for each in results if each.misses}


def table(kind: str, backend: str, results: Sequence[Found]) -> str:
    """Markdown: what each mutant does wrong, and the tests that found it."""
    num_caught, kind = sum(each.caught for each in results), kind.replace("_", " ")
    lines = [f"**{kind} {backend}**: {num_caught} of {len(results)} found.", ""]
    article = "An" if kind[0] in "aeiou" else "A"
    lines += [f"| {article} {kind} that ... | is found by |", "|---|---|"]
    for each in results:
        tests = ", ".join(f"`{name}`" for name in by_test(each.failed)) or "**nothing**"
        lines.append(f"| {each.mutant.name} | {tests} |")
    return "\n".join([*lines, ""])


def by_test(names: Sequence[str] | dict[str, str]) -> list[str]:
    """Names of tests without their parameters."""
    return list(dict.fromkeys(re.sub(r"\[.*", "", name) for name in names))


def write(page: Path, text: str) -> None:
    """Put the tables between the page's marks."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{page} has no lines {BEGIN!r} and {END!r}")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sdk.kit.mutants", description=(__doc__ or "").split("\n")[0])
    for kind, target in TARGETS.items():
        parser.add_argument(f"--{kind}", default=target.backend, help=f"a sound {kind} to put faults into; '' for none")
    parser.add_argument("--only", default="", help="mutants with this in their name")
    parser.add_argument("--all", action="store_true", help="every test on every mutant, not only the named ones")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="also write the tables into this page")
    args = parser.parse_args(argv)
    tables, misses = [], []
    for kind, target in TARGETS.items():
        backend = getattr(args, kind)
        mutants = [mutant for mutant in target.mutants if args.only in mutant.name]
        if not backend or not mutants:
            continue
        results = run(kind, backend, mutants, every=args.all)
        tables.append(table(kind, backend, results))
        misses += [each.mutant.name for each in results if not each.caught]
        print(tables[-1])
        for each in results:
            for test, why in each.failed.items():
                print(f"  {each.mutant.name}: {test}: {why[:160]}", file=sys.stderr)
    if args.write:
        write(args.write, "\n".join(tables))
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
