"""Fragments of the changelog: one file a change, which towncrier puts together."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TYPES = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]["fragment"])
FRAGMENTS = sorted(ROOT.glob("changelog/*.md"))


def faults_of(file: Path) -> list[str]:
    """What is wrong with a fragment."""
    slug, _, kind = file.name.removesuffix(".md").rpartition(".")
    lines = file.read_text().splitlines()
    faults = []
    if not slug or "." in slug or kind not in TYPES:
        faults.append(f"{file.name}: want <slug>.<{'|'.join(sorted(TYPES))}>.md")
    if not 1 <= len(lines) <= 3 or not all(line.strip() for line in lines):
        faults.append(f"{file.name}: want one to three lines, has {len(lines)}")
    return faults


def test_every_fragment_has_a_known_type_and_one_to_three_lines() -> None:
    assert {"added", "changed", "fixed", "removed"} == TYPES
    assert [fault for file in FRAGMENTS for fault in faults_of(file)] == []
    assert {file.suffix for file in (ROOT / "changelog").iterdir()} <= {".md", ".jinja"}


@pytest.mark.parametrize(
    ("name", "text", "is_good"),
    [
        ("slug.added.md", "One line.\n", True),
        ("slug.fixed.md", "One\ntwo\nthree.\n", True),
        ("slug.md", "No type.\n", False),
        ("slug.mended.md", "Unknown type.\n", False),
        ("slug.added.md", "", False),
        ("slug.added.md", "One\ntwo\nthree\nfour\n", False),
    ],
)
def test_the_rule_on_fragments_bites(tmp_path: Path, name: str, text: str, is_good: bool) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert (faults_of(file) == []) is is_good


def test_the_next_changelog_has_every_fragment() -> None:
    command = [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "next"]
    draft = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    words = " ".join(draft.split())
    assert [file.name for file in FRAGMENTS if " ".join(file.read_text().split()) not in words] == []
