"""Docstrings describe arguments that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("core", "manymesh", "sdk", "plugins", "examples", "benchmarks", "scripts")
ARGUMENTS = re.compile(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*): ", re.MULTILINE)
Described = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def described(docstring: str) -> set[str]:
    """The names in its section of arguments."""
    _, heading, section = docstring.partition("Args:\n")
    section = re.split(r"\n(?=\S)", section)[0] if heading else ""
    return {name.strip("*") for names in ARGUMENTS.findall(section) for name in names.split(", ")}


def arguments(node: Described) -> set[str] | None:
    """The names that it can be called with; None where others may pass: **options, or an inherited constructor."""
    if isinstance(node, ast.ClassDef):
        annotated = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
        fields = {target.id for target in annotated if isinstance(target, ast.Name)}
        for each in node.body:
            if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                names = arguments(each)
                return None if names is None else names | fields
        return fields or None
    every = node.args
    if every.kwarg is not None:
        return None
    positional = [*every.posonlyargs, *every.args, *([] if every.vararg is None else [every.vararg])]
    return {each.arg for each in (*positional, *every.kwonlyargs)}


def untrue(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, Described) and (names := arguments(node)) is not None:
            for name in sorted(described(ast.get_docstring(node) or "") - names):
                yield f"{node.name}: {name}"


def test_docstrings_describe_arguments_that_exist() -> None:
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 200
    assert [f"{file.relative_to(ROOT)}: {each}" for file in files for each in untrue(file.read_text())] == []


def test_the_rule_on_docstrings_bites() -> None:
    text = '''
class Box:
    """A box.

    Args:
        size, colour: of the box.
    """

    def __init__(self, size: int) -> None:
        """Args as above."""

    def fill(self, *things: object, lid: bool) -> None:
        """Fill it.

        Args:
            things: what goes in,
                with more: in a second line.
            lid, label: on it.

        Raises:
            Refused: it is full.
        """
'''
    assert list(untrue(text)) == ["Box: colour", "fill: label"]
