"""What the docs say is what the code does."""

from __future__ import annotations

import re
from itertools import zip_longest
from pathlib import Path
from typing import Any, get_args, get_type_hints

import attrs
import pytest

import core
from core.config import OptimizerConfig
from manymesh.recipes.grpo.config import GrpoConfig
from scripts import reference
from sdk.testing import tiny_model

DOCS = Path(__file__).parents[1] / "docs"


def options(cls: Any) -> set[str]:
    """Names of all options below an attrs class."""
    found: set[str] = set()
    for name, hint in get_type_hints(cls).items():
        if name in {field.name for field in attrs.fields(cls)}:
            found.add(name)
            for each in (hint, *get_args(hint)):
                if attrs.has(each):
                    found |= options(each)
    return found


def test_every_option_of_the_recipe_is_in_its_page() -> None:
    page = (DOCS / "grpo.md").read_text()
    words = set(re.findall(r"\w+", page))
    assert options(GrpoConfig) | options(OptimizerConfig) - {"factory", "options"} <= words | {"factory"}


def test_the_driver_of_the_docs_runs(ray_cluster: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "driver.md").read_text(), re.DOTALL)
    code = blocks[0].replace("path/to/model", tiny_model(tmp_path / "model"))
    assert "ray.init(num_cpus=2)\n" in code
    exec(code.replace("ray.init(num_cpus=2)\n", ""), {})  # the tests have a cluster
    assert "grad_norm" in capsys.readouterr().out


def test_the_reference_is_what_the_docstrings_say() -> None:
    have, want = reference.PAGE.read_text().splitlines(), reference.page().splitlines()
    differing = [(a, b) for a, b in zip_longest(have, want) if a != b]
    assert differing[:1] == [], "docs/reference.md is behind the docstrings: make docs"


def test_the_reference_has_every_public_name_of_core_and_every_part() -> None:
    headings = set(re.findall(r"^#{3,4} (\S+)$", reference.page(), re.MULTILINE))
    parts = {f"sdk.parts.{file.stem}" for file in (DOCS.parent / "sdk/parts").glob("[a-z]*.py")}
    assert set(core.__all__) | parts <= headings


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_python_in_the_docs_compiles_and_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        compile(block, str(page), "exec")
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).exists(), link
