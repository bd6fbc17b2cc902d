"""What the docs say is what the code does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path
from typing import Any, get_args, get_type_hints

import attrs
import pytest
import torch
from tensordict import TensorDict

from core.batch import jagged
from core.config import OptimizerConfig
from core.lazy import typed_imports
from core.list_engines import options as options_with_help
from core.manifest import Capability
from core.registry import Backend, EngineRegistry
from manymesh.recipes.grpo.config import GrpoConfig
from scripts import backends, reference
from sdk.scaffold.generate import generate
from sdk.scaffold.names import Names
from sdk.testing import tiny_model

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), DOCS.parent / "README.md", DOCS.parent / "CONTRIBUTING.md"]


def options(cls: Any) -> set[str]:
    """Names of all options below an attrs class."""
    names: set[str] = set()
    for name, hint in get_type_hints(cls).items():
        if name in {field.name for field in attrs.fields(cls)}:
            names.add(name)
            for each in (hint, *get_args(hint)):
                if attrs.has(each):
                    names |= options(each)
    return names


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


def test_the_loop_on_the_first_screen_of_the_readme_runs(
    ray_cluster: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (DOCS.parent / "README.md").read_text()
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    first_screen = page.splitlines()[:40]
    assert code.splitlines()[-1] in first_screen
    prompts = TensorDict({"prompt_ids": jagged([torch.tensor([1, 2, 3]), torch.tensor([4, 5])])}, batch_size=[2])
    exec(code, {"model": tiny_model(tmp_path / "model"), "prompts": prompts})
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if "grad_norm" in line]) == 3


def test_the_steps_by_hand_of_new_plugins_run_as_their_pages_have_them(tmp_path: Path) -> None:
    """Each with the distribution that its page makes, in a process that knows no other tests' world."""
    for kind, package in (("engine", "my_engine"), ("rollout", "my_rollout")):
        page = (DOCS / f"write_{'an' if kind == 'engine' else 'a'}_{kind}.md").read_text()
        name = package.replace("_", "-")
        assert f"python -m sdk new {name} --kind {kind}\n" in page
        generate(Names.of(name, "engine" if kind == "engine" else "rollout"), tmp_path / name)
        (block,) = (each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if f"from {package}" in each)
        (tmp_path / f"{package}_page.py").write_text(block)
    script = "import sys; sys.path[:0] = ['my-engine', 'my-rollout']; import my_engine_page, my_rollout_page"
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    process = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+), gradient norm", process.stdout)]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True), "it learns"
    assert "tensor([0, 0, 0, 0, 0, 0])" in process.stdout
    assert process.stdout.endswith("tensor([7, 7])\n")


def test_the_reference_is_what_the_docstrings_say() -> None:
    have, want = reference.PAGE.read_text().splitlines(), reference.page().splitlines()
    differing = [(a, b) for a, b in zip_longest(have, want) if a != b]
    assert differing[:1] == [], "docs/reference.md is behind the docstrings: make docs"


def test_the_comparison_of_backends_is_what_their_manifests_say() -> None:
    assert backends.PAGE.read_text() == backends.page(), "docs/backends.md is behind the manifests: make docs"
    assert set(backends.MEANING) == set(Capability)


def test_the_reference_has_every_public_name_of_core_and_every_part() -> None:
    headings = set(re.findall(r"^#{3,4} (\S+)$", reference.page(), re.MULTILINE))
    parts = {f"manymesh.parts.{file.stem}" for file in (DOCS.parent / "manymesh/parts").glob("[a-z]*.py")}
    assert set(typed_imports("core")) | parts <= headings


def test_the_page_on_plugins_has_every_part() -> None:
    page = (DOCS / "plugin.md").read_text()
    assert [
        file.stem for file in (DOCS.parent / "manymesh/parts").glob("[a-z]*.py") if f"`{file.stem}`" not in page
    ] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_in_the_docs_compiles_and_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        compile(block, str(page), "exec")
    for link, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", text):
        target = page.parent / link if link else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), f"{link}#{anchor}"


def anchors(page: Path) -> set[str]:
    """What GitHub and others make of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_every_option_of_the_backends_here_has_its_help() -> None:
    backends_here = [
        entry
        for entry in EngineRegistry.discover().entries
        if isinstance(entry, Backend) and entry.distribution.startswith("manymesh") and entry.manifest.config
    ]
    assert {"fsdp", "megatron", "hf", "vllm", "sglang_server", "disk"} <= {entry.name for entry in backends_here}
    without = [
        f"{entry.name}: {option.name}"
        for entry in backends_here
        for option in options_with_help(entry.load("config"))
        if not option.help
    ]
    assert without == []
