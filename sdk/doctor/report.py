"""What the doctor says: lines in a terminal, or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import attrs
from rich.console import Console
from rich.text import Text

from sdk.doctor.checks import Finding

MARKS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "problem": ("✗", "red")}


def as_json(findings: Iterable[Finding]) -> str:
    """`{"schema": 1, "healthy": bool, "findings": [{"check", "level", "detail", "mend"}]}`."""
    values = list(findings)
    return json.dumps(
        {"schema": 1, "healthy": healthy(values), "findings": [attrs.asdict(each) for each in values]}, indent=2
    )


def healthy(findings: Sequence[Finding]) -> bool:
    return all(each.level != "problem" for each in findings)


def show(findings: Iterable[Finding], console: Console) -> list[Finding]:
    """Print each as it comes, since torch takes a while, and a summary. Gives them back."""
    printed = []
    for each in findings:
        mark, style = MARKS[each.level]
        # Text, not markup: what plugins say may hold brackets.
        colon = ": " if each.detail else ""
        console.print(
            Text.assemble((mark, style), f" {each.check}{colon}", (each.detail, "dim" * (each.level == "ok")))
        )
        if each.mend:
            console.print(Text(f"    mend: {each.mend}"))
        printed.append(each)
    problems, warnings = (sum(each.level == level for each in printed) for level in ("problem", "warning"))
    if problems or warnings:
        console.print(f"\n{problems} problem{'s' * (problems != 1)}, {warnings} warning{'s' * (warnings != 1)}")
    else:
        console.print("\nall is well")
    return printed
