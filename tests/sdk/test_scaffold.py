"""`python -m sdk new`: what it names, writes and refuses. The slow set installs what it makes, and trains with it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.requirements import Requirement

import core
from core.errors import Refused
from core.registry import EngineRegistry, Status
from sdk.__main__ import main
from sdk.scaffold.generate import generate, render, template
from sdk.scaffold.names import LONGEST, Kind, Names
from tests.fake_distributions import forget

KINDS: tuple[Kind, ...] = ("engine", "rollout", "transfer")
PLANNED: tuple[Kind, ...] = ("engine", "rollout")  # a transfer has no place among ranks to plan


@pytest.mark.parametrize(
    ("name", "kind", "package", "backend", "cls"),
    [
        ("my-engine", "engine", "my_engine", "my-engine", "MyEngine"),
        ("toy", "engine", "toy", "toy", "ToyEngine"),
        ("toy", "rollout", "toy", "toy", "ToyRollout"),
        ("manymesh-toy", "engine", "manymesh_toy", "toy", "ToyEngine"),
        ("Acme.Fast_Rollout", "rollout", "acme_fast_rollout", "acme-fast-rollout", "AcmeFastRollout"),
        ("manymesh-3d", "engine", "manymesh_3d", "3d", "Manymesh3dEngine"),
        ("fast-transfer", "transfer", "fast_transfer", "fast-transfer", "FastTransfer"),
    ],
)
def test_one_name_gives_all_the_others(name: str, kind: Kind, package: str, backend: str, cls: str) -> None:
    names = Names.of(name, kind)
    assert (names.package, names.backend, names.cls) == (package, backend, cls)


@pytest.mark.parametrize("name", ["", "-x", "my engine", "a/b", "motor*", "x" * (LONGEST + 1), "ümlaut", "..", "x\n"])
def test_what_pip_would_not_take_as_a_name_is_refused_with_one_that_it_would(name: str) -> None:
    with pytest.raises(Refused, match="cannot be the name of a distribution") as raised:
        Names.of(name, "engine")
    Names.of(raised.value.mend.removeprefix("for example ").strip("'"), "engine")


@pytest.mark.parametrize("name", ["class", "3d", "import"])
def test_what_python_cannot_import_is_refused(name: str) -> None:
    with pytest.raises(Refused, match="cannot import a package called") as raised:
        Names.of(name, "engine")
    Names.of(raised.value.mend.removeprefix("for example ").strip("'"), "engine")


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("manymesh", "engine", "a distribution 'manymesh' is installed already"),
        ("PyTest", "engine", "a distribution 'pytest' is installed already"),
        ("json", "engine", "a module of Python's own"),
        ("core", "engine", "`import core` finds something already"),
        ("sdk", "rollout", "`import sdk` finds something already"),
        ("fsdp", "engine", "there is an engine 'fsdp' already"),
        ("hf", "rollout", "there is a rollout 'hf' already"),
        ("disk", "transfer", "there is a transfer 'disk' already"),
    ],
)
def test_a_name_that_something_installed_has_is_refused(name: str, kind: Kind, message: str) -> None:
    with pytest.raises(Refused) as raised:
        Names.of(name, kind).check_free()
    assert message in str(raised.value)
    assert "choose another name" in raised.value.mend


def test_an_engine_may_have_the_name_of_a_rollout() -> None:
    Names.of("vllm-of-mine", "engine").check_free(EngineRegistry.default().entries)
    Names.of("hf-of-mine", "engine").check_free(())


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_are_a_whole_project(tmp_path: Path, kind: Kind) -> None:
    names = Names.of("acme-thing", kind)
    files = generate(names, tmp_path / "acme")
    inside = sorted(str(file.relative_to(tmp_path / "acme")) for file in files)
    assert inside == sorted(
        [
            ".github/workflows/ci.yml",
            ".gitignore",
            "CHANGELOG.md",
            "README.md",
            "pyproject.toml",
            "tests/test_conformance.py",
            *(f"acme_thing/{file}" for file in ("__init__.py", "config.py", "manifest.py", "py.typed")),
            *(["acme_thing/plan.py"] if kind in PLANNED else []),
            f"acme_thing/{kind}.py",
        ]
    )
    assert all(file.is_file() for file in files)
    assert os.listdir(tmp_path) == ["acme"], "nothing is left aside"
    assert (tmp_path / "acme").stat().st_mode & 0o777 == 0o755
    project = tomllib.loads((tmp_path / "acme/pyproject.toml").read_text())
    assert project["project"]["name"] == "acme-thing"
    assert project["project"]["entry-points"] == {"manymesh.v1": {"acme-thing": "acme_thing.manifest"}}
    assert "license" not in project["project"], "that is the author's to choose"


@pytest.mark.parametrize("kind", KINDS)
def test_no_name_of_the_template_is_left(kind: Kind) -> None:
    for path, text in render(Names.of("acme-thing", kind)):
        for word in ("template-", "template_", "Template"):
            assert word not in text, path
            assert word not in str(path)


def test_what_a_name_brings_in_is_not_taken_for_the_templates() -> None:
    files = {str(path): text for path, text in render(Names.of("my-template-engine", "engine"))}
    assert 'name = "my-template-engine"' in files["pyproject.toml"]
    assert "class MyTemplateEngine(" in files["my_template_engine/engine.py"]


@pytest.mark.parametrize("kind", KINDS)
@given(name=st.from_regex(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", fullmatch=True))
@settings(max_examples=20, deadline=None)
def test_whatever_the_name_the_sources_are_python_with_no_line_too_long(kind: Kind, name: str) -> None:
    try:
        names = Names.of(name, kind)
    except Refused:
        return
    for path, text in render(names):
        if path.suffix == ".py":
            ast.parse(text)
            assert max(map(len, text.splitlines()), default=0) <= 120
        if path.name == "pyproject.toml":
            tomllib.loads(text)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["z", "the-" + "long-" * 6 + "one"])
def test_the_sources_are_formatted_and_sorted_whatever_the_name(tmp_path: Path, kind: Kind, name: str) -> None:
    generate(Names.of(name, kind), tmp_path / "made")
    for command in (["check"], ["format", "--check"]):
        process = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "."], cwd=tmp_path / "made", capture_output=True, text=True
        )
        assert process.returncode == 0, process.stdout + process.stderr


def test_a_directory_that_holds_something_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    names = Names.of("acme-thing", "engine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for directory, message in (("full", "is not empty"), ("file", "is a file")):
        with pytest.raises(Refused, match=message):
            generate(names, tmp_path / directory)
    assert sorted(os.listdir(tmp_path)) == ["file", "full"]
    assert os.listdir(tmp_path / "full") == ["mine.txt"]
    (tmp_path / "empty").mkdir()
    assert generate(names, tmp_path / "empty")


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match="cannot write to"):
        generate(Names.of("acme-thing", "engine"), tmp_path / "file/below")


def test_the_command_makes_it_where_it_is_told_and_says_what_to_do_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "acme-thing", "--kind", "rollout"]) == 0
    message = capsys.readouterr().out
    assert "cd acme-thing" in message
    assert "python -m sdk check acme-thing" in message
    assert (tmp_path / "acme-thing/acme_thing/rollout.py").is_file()
    assert main(["new", "acme-thing", "--dir", "other/place"]) == 0
    assert (tmp_path / "other/place/acme_thing/engine.py").is_file()


def test_the_command_exits_2_with_the_reason_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "my engine"]) == 2
    message = capsys.readouterr().err
    assert "cannot be the name" in message
    assert "mend: for example 'my-engine'" in message
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_made_is_for_this_version_of_manymesh(kind: Kind) -> None:
    project = tomllib.loads((template(kind) / "pyproject.toml").read_text())["project"]
    (ours,) = (Requirement(text) for text in project["dependencies"] if text.startswith("manymesh"))
    assert ours.specifier.contains(core.__version__)


@pytest.mark.parametrize("kind", PLANNED)
def test_what_is_made_is_listed_as_usable_and_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    """As an editable install: metadata that points at the sources."""
    project = tmp_path / "acme"
    generate(Names.of("acme-thing", kind), project)
    info = project / "acme_thing-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-thing\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[manymesh.v1]\nacme-thing = acme_thing.manifest\n")
    monkeypatch.syspath_prepend(str(project))
    try:
        registry = EngineRegistry.discover({})
        backend = registry.find("acme-thing", kind)
        assert (backend.status, backend.version) == (Status.OK, "0.1.0")
        plan = backend.plan({"model": "somewhere"}, 4, None)
        assert plan is not None
        assert plan.route.dp_ranks == (0, 1, 2, 3)
        with pytest.raises(Refused, match="needs a rank"):
            backend.plan({"model": "somewhere"}, 0, None)
    finally:
        forget(project)
