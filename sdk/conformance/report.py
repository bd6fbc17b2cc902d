"""What the suites of a session found: counts, the score, and a table by capability."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs

if TYPE_CHECKING:
    from sdk.conformance.base import Conformance

TestOutcome = Literal["passed", "failed", "expected failure", "closed", "skipped", "not run"]


@attrs.define
class Result:
    """One test. `reason`: why it failed (one line), is expected to, is closed or was skipped."""

    name: str
    capabilities: tuple[str, ...] = ()
    outcome: TestOutcome = "not run"
    reason: str = ""
    seconds: float = 0.0


@attrs.define
class SuiteResult:
    """One suite on one backend."""

    suite: str
    backend: str
    kind: str
    model_type: str
    distribution: str
    version: str
    config: dict[str, Any]
    offers: tuple[str, ...]
    could_offer: tuple[str, ...]  # what tests of this suite are about
    tests: dict[str, Result] = attrs.field(factory=dict)

    def count(self, *outcomes: TestOutcome) -> int:
        return sum(test.outcome in outcomes for test in self.tests.values())

    @property
    def score(self) -> str:
        """Passed of those that had to."""
        passed = self.count("passed")
        return f"{passed}/{passed + self.count('failed', 'not run')}"

    @property
    def title(self) -> str:
        of = f" ({self.model_type})" if self.model_type else ""
        with_options = f" {json.dumps(self.config)}" if self.config else ""
        return f"{self.backend} {self.version}{of}{with_options}"

    def line(self) -> str:
        expected = [test.reason for test in self.tests.values() if test.outcome == "expected failure"]
        parts = [f"{self.count('passed')} passed"]
        parts += [f"{self.count('failed')} failed"] if self.count("failed") else []
        if expected:
            reasons = "; ".join(dict.fromkeys(expected))
            parts.append(f"{len(expected)} expected failure{'s' if len(expected) > 1 else ''} ({reasons})")
        closed = self.count("closed")
        parts += [f"{closed} closed by capabilities"] if closed else []
        parts += [f"{n} {what}" for what in ("skipped", "not run") if (n := self.count(what))]
        return f"conformance {self.title}: {', '.join(parts)}; score {self.score}"

    def capabilities(self) -> dict[str, dict[str, Any]]:
        """By capability: whether the manifest has it, and what became of the tests about it."""
        table = {}
        for name in self.could_offer:
            about = [test for test in self.tests.values() if name in test.capabilities]
            counts = Counter(test.outcome for test in about if test.outcome != "closed")
            table[name] = {"offered": name in self.offers, "tests": dict(counts)}
        return table


class Report:
    """All suites of a session, by class."""

    def __init__(self) -> None:
        self.suites: dict[type[Conformance], SuiteResult] = {}

    def collected(self, suite: type[Conformance], item: Any) -> str:
        """Note a test; gives the reason why it is closed, or ""."""
        result = self._suite(suite)
        gates = gates_of(item)
        capabilities = tuple(dict.fromkeys(str(each.capability) for each in gates if each.capability))
        reason = next((text for each in gates if (text := each.closed(suite))), "")
        result.tests[item.name] = Result(item.name, capabilities, "closed" if reason else "not run", reason)
        return reason

    def ran(self, suite: type[Conformance], item: Any, report: Any) -> None:
        """Note one phase of a test: setup, call or teardown."""
        test = self._suite(suite).tests.setdefault(item.name, Result(item.name))
        test.seconds += report.duration
        if report.failed:
            test.outcome, test.reason = "failed", last_line(report)
        elif report.skipped:
            expected = hasattr(report, "wasxfail")
            test.outcome = "expected failure" if expected else "skipped"
            test.reason = report.wasxfail if expected else str(report.longrepr[-1])
        elif report.when == "call":
            test.outcome = "passed"

    def _suite(self, suite: type[Conformance]) -> SuiteResult:
        if suite not in self.suites:
            entry, manifest = suite.entry(), suite.manifest()
            several = len(manifest.model_types) > 1
            self.suites[suite] = SuiteResult(
                suite=f"{suite.__module__}.{suite.__qualname__}",
                backend=suite.backend,
                kind=suite.kind,
                model_type=(suite.model_type or "language_model") if several else "",
                distribution=entry.distribution,
                version=entry.version,
                config=dict(suite.config),
                offers=tuple(sorted(map(str, suite.capabilities()))),
                could_offer=tuple(sorted({str(g.capability) for g in all_gates(suite) if g.capability})),
            )
        return self.suites[suite]

    def lines(self) -> list[str]:
        """The summary for the terminal: each suite's score, and what its capabilities came to."""
        lines = []
        for result in self.suites.values():
            lines.append(result.line())
            cells = []
            for name, row in result.capabilities().items():
                tests = ", ".join(f"{number} {what}" for what, number in row["tests"].items()) or "no test ran"
                cells.append((name, "offered" if row["offered"] else "absent", tests))
            width = max((len(name) for name, *_ in cells), default=0)
            lines += [f"  {name:<{width}}  {state:<7}  {tests}" for name, state, tests in cells]
        return lines

    def as_dict(self) -> dict[str, Any]:
        suites = []
        for result in self.suites.values():
            data = attrs.asdict(result, filter=lambda field, _: field.name not in ("tests", "offers", "could_offer"))
            counts = {name.replace(" ", "_"): result.count(name) for name in ("passed", "failed", "expected failure")}
            data |= counts | {"closed": result.count("closed"), "score": result.score, "line": result.line()}
            data |= {"capabilities": result.capabilities()}
            data["tests"] = [attrs.asdict(test) for test in result.tests.values()]
            suites.append(data)
        return {"schema": 1, "suites": suites}

    def write(self, file: Path) -> None:
        """JSON or Markdown, by the file's suffix."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(self.as_dict(), indent=1) + "\n" if file.suffix == ".json" else self.markdown())

    def markdown(self) -> str:
        lines = ["# Conformance", ""]
        for result in self.suites.values():
            lines += [f"## {result.title}", "", result.line(), ""]
            lines += ["| capability | in the manifest | tests about it |", "|---|---|---|"]
            for name, row in result.capabilities().items():
                tests = ", ".join(f"{number} {what}" for what, number in row["tests"].items()) or "none ran"
                lines.append(f"| {name} | {'offered' if row['offered'] else 'absent'} | {tests} |")
            lines += ["", "| test | outcome | reason | seconds |", "|---|---|---|---|"]
            for test in result.tests.values():
                reason = test.reason.replace("|", "\\|")
                lines.append(f"| `{test.name}` | {test.outcome} | {reason} | {test.seconds:.1f} |")
            lines.append("")
        return "\n".join(lines)


def gates_of(item: Any) -> tuple[Any, ...]:
    from sdk.conformance.base import GATE

    return tuple(getattr(item.function, GATE, ()))


def all_gates(suite: type[Conformance]) -> list[Any]:
    from sdk.conformance.base import GATE

    return [each for name in dir(suite) for each in getattr(getattr(suite, name), GATE, ())]


def last_line(report: Any) -> str:
    """Of a failure: the message of what was raised, in one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message) if crash is not None else str(report.longrepr)
    if "Traceback (most recent call last)" in text:  # of a rank: what it ended with
        first, *_, last = [line for line in text.splitlines() if line.strip()]
        text = f"{first} {last}"
    return " ".join(text.split())[:300]
