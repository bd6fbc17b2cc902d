"""The listing as an operator sees it: a table or JSON, and an exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core.list_engines import as_dict, main
from core.registry import EngineRegistry
from tests.fake_distributions import BACKEND, forget, install, manifest, plugin

HEAVY = ("torch", "ray", "vllm", "sglang", "megatron", "transformers", "tensordict")
BROKEN = {
    "import-toy": "raise ImportError('no libfoo.so')",
    "runtime-toy": "raise RuntimeError('[/red] needs a driver')",
    "syntax-toy": "def f(:\n",
    "exit-toy": "import sys; print('bye'); sys.exit(3)",
}


OPTIONS = """\
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from core.config import EngineConfig

@attrs.frozen
class First:
    '''Attributes:
        top: at the start
            of a docstring.
    '''

    top: int = 3

@attrs.frozen
class Inner:
    '''What is within.

    Attributes:
        low, high: bounds, both
            of them.
        other: none of these

    Other prose: not an option.
    '''

    low: int = 1
    high: int = 2
    undocumented: Mapping[str, Any] = attrs.field(factory=dict)

@attrs.frozen
class Config(EngineConfig):
    speed: Literal["slow", "fast"] = "slow"  # how fast: # or so
    inner: Inner = attrs.field(factory=Inner)
    first: First = attrs.field(factory=First)
    late: int = attrs.field(default=attrs.Factory(lambda self: 7, takes_self=True))
"""


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good plugin, four broken ones, one of another API and one that lacks what it requires."""
    folder = tmp_path_factory.mktemp("site")
    good = manifest("toy", "acme_toy", summary="a toy", requires=(("pluggy>=1", "nobody-has-this"),))
    install(folder, "acme-toy", {"acme_toy.py": "print('hello')\n" + plugin(good), "acme_toy_backend.py": BACKEND})
    for name, source in BROKEN.items():
        install(folder, name, {f"{name.replace('-', '_')}.py": source}, version="7.1")
    install(folder, "next-toy", {"next_toy.py": ""}, group="manymesh.v2")
    rich = manifest("rich", "rich_toy", requires=(("attrs>=24",), ("nobody-has-this>=2",)), summary="rich")
    bad = manifest("bad", "rich_toy", config="rich_toy:nowhere", summary="its options cannot be imported")
    install(folder, "rich-toy", {"rich_toy.py": plugin(rich, bad), "rich_toy_backend.py": OPTIONS}, version="2.0")
    lacking = manifest("lacking", "lacking_toy", kind="rollout", requires=(("nobody-has-this>=2",),))
    install(folder, "lacking-toy", {"lacking_toy.py": plugin(lacking)})
    return folder


def run(site: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "core.list_engines", *args]
    environ = os.environ | {"PYTHONPATH": str(site)} | env
    return subprocess.run(command, env=environ, cwd=site.parent, capture_output=True, text=True, check=False)


@pytest.fixture(scope="session")
def listing(site: Path) -> dict[str, dict[str, Any]]:
    """The JSON listing, by distribution."""
    process = run(site, "--json")
    assert process.returncode == 0, process.stderr
    answer = json.loads(process.stdout)
    assert answer["schema"] == 1
    names = [entry["name"] for entry in answer["entries"]]
    assert names == sorted(names)
    return {entry["distribution"]: entry for entry in answer["entries"]}


def test_json_says_all_of_a_good_plugin(listing: dict[str, dict[str, Any]]) -> None:
    assert listing["acme-toy"] == {
        "name": "toy",
        "kind": "engine",
        "status": "ok",
        "distribution": "acme-toy",
        "version": "1.0",
        "reason": "",
        "mend": "",
        "devices": ["cpu", "cuda"],
        "model_types": ["language_model"],
        "capabilities": [],
        "factory": "acme_toy_backend:Backend",
    }


@pytest.mark.parametrize(
    ("distribution", "output"),
    [
        ("import-toy", "ImportError: no libfoo.so"),
        ("runtime-toy", "RuntimeError: [/red] needs a driver"),
        ("syntax-toy", "SyntaxError: "),
        ("exit-toy", "SystemExit: 3"),
    ],
)
def test_json_says_why_a_plugin_is_broken_and_how_to_mend_it(
    listing: dict[str, dict[str, Any]], distribution: str, output: str
) -> None:
    entry = listing[distribution]
    assert (entry["status"], entry["kind"], entry["version"]) == ("broken", None, "7.1")
    assert entry["reason"].startswith(output)
    assert distribution in entry["mend"]
    assert (entry["devices"], entry["capabilities"], entry["factory"]) == ([], [], None)


def test_json_says_what_is_incompatible_and_what_lacks_a_dependency(listing: dict[str, dict[str, Any]]) -> None:
    assert listing["next-toy"]["status"] == "incompatible"
    lacking = listing["lacking-toy"]
    assert (lacking["status"], lacking["kind"], lacking["devices"]) == (
        "missing-dependency",
        "rollout",
        ["cpu", "cuda"],
    )
    assert lacking["mend"] == "pip install 'nobody-has-this>=2'"


def test_the_table_has_a_line_for_each_and_the_mend_below(site: Path) -> None:
    process = run(site)
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    assert lines[0].split() == ["kind", "name", "status", "distribution", "devices"]
    assert any(" ".join(line.split()) == "engine toy ok acme-toy 1.0 cpu, cuda a toy" for line in lines)
    (at,) = (number for number, line in enumerate(lines) if "[/red] needs a driver" in line)
    assert lines[at].split()[:4] == ["?", "runtime-toy", "broken", "runtime-toy"]
    assert lines[at + 1].lstrip().startswith("mend: ")
    assert "bye" not in process.stdout, "what plugins print goes to stderr"


def test_nothing_heavy_is_imported_by_a_listing(site: Path) -> None:
    script = (
        "import sys; from core.list_engines import main; main([]); main(['--json', '--verbose'])\n"
        "main(['rich']); main(['fsdp'])\n"
        f"sys.exit(sorted(set({HEAVY}) & set(sys.modules)) or 0)"
    )
    env = os.environ | {"PYTHONPATH": str(site)}
    process = subprocess.run([sys.executable, "-c", script], env=env, cwd=site.parent, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


def test_strict_exits_1_when_anything_is_not_ok_but_not_for_what_is_disabled(site: Path) -> None:
    assert run(site, "--strict").returncode == 1
    assert run(site, "--strict", "--json", MANYMESH_PLUGINS="acme-toy").returncode == 0
    assert run(site, "--strict", "--json", MANYMESH_PLUGINS="acme-toy,lacking-toy").returncode == 1


@pytest.fixture
def here(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineRegistry]:
    """The listing's plugins in this process, which `main` then finds."""
    monkeypatch.syspath_prepend(str(site))
    registry = EngineRegistry.discover({})
    monkeypatch.setattr(EngineRegistry, "discover", classmethod(lambda cls: registry))
    yield registry
    forget(site)


def test_kind_narrows_the_listing_but_keeps_plugins_whose_kind_is_unknown(
    here: EngineRegistry, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["--kind", "rollout", "--json"]) == 0
    entries = {entry["distribution"]: entry["kind"] for entry in json.loads(capsys.readouterr().out)["entries"]}
    assert "acme-toy" not in entries
    assert entries["lacking-toy"] == "rollout"
    assert entries["import-toy"] is None
    with pytest.raises(SystemExit, match="2"):
        main(["--kind", "rollouts"])


def test_verbose_adds_what_the_manifest_says(here: EngineRegistry, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--verbose"])
    output = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert any(line.startswith("requires: pluggy>=1 or nobody-has-this: met") for line in output)
    assert "factory: acme_toy_backend:Backend" in output
    assert "config: acme_toy_backend:Config" in output
    assert "capabilities: none" in output
    assert "module: runtime_toy" in output


def test_a_terminal_gets_colours_and_no_markup_is_read_out_of_errors(
    here: EngineRegistry, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    main([])
    output = capsys.readouterr().out
    assert "\x1b[32mok" in output
    assert "\x1b[31mbroken" in output
    assert "[/red] needs a driver" in output


def test_without_plugins_the_listing_says_how_to_install_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(EngineRegistry, "discover", classmethod(lambda cls: EngineRegistry(())))
    assert main(["--strict"]) == 0
    output = capsys.readouterr().out
    assert "pip install 'manymesh[" in output
    assert "'manymesh.v1'" in output
    assert main(["--kind", "transfer"]) == 0
    assert "No plugin that offers a transfer is installed" in capsys.readouterr().out
    assert main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "entries": []}


def test_every_entry_of_this_environment_can_be_written_as_json() -> None:
    for entry in EngineRegistry.discover({}).entries:
        assert json.loads(json.dumps(as_dict(entry)))["distribution"] == entry.distribution


def shown(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    capsys.readouterr()
    assert main(args) == 0
    return capsys.readouterr().out


def test_a_name_shows_one_plugin_in_full_with_its_options_types_defaults_and_help(
    here: EngineRegistry, capsys: pytest.CaptureFixture[str]
) -> None:
    output = [" ".join(line.split()) for line in shown(capsys, "rich").splitlines()]
    assert output[0] == "engine rich: rich"
    assert "distribution: rich-toy 2.0" in output
    assert "requires: attrs>=24: met (attrs" in " ".join(output)
    assert "model str required directory of a Hugging Face checkpoint" in output
    assert "speed Literal['slow', 'fast'] = 'slow' how fast: # or so" in output
    assert "inner.high int = 2 bounds, both of them." in output
    assert "first.top int = 3 at the start of a docstring." in output
    assert "inner.undocumented Mapping[str, Any] = {}" in output
    assert "optimizer.max_grad_norm float = 1.0 0: no clipping" in output


def test_json_of_one_plugin_adds_to_what_the_listing_has(
    here: EngineRegistry, capsys: pytest.CaptureFixture[str]
) -> None:
    (entry,) = json.loads(shown(capsys, "rich-toy:rich", "--json"))["entries"]
    entries = {each["name"]: each for each in json.loads(shown(capsys, "--json"))["entries"]}
    assert entries["rich"].items() <= entry.items()
    options = {option["name"]: option for option in entry["options"]}
    assert options["model"] == {
        "name": "model",
        "type": "str",
        "default": None,
        "help": "directory of a Hugging Face checkpoint",
    }
    assert options["inner.low"]["default"] == "1"
    assert entry["requires"][1]["have"] == {"nobody-has-this": None}


def test_a_distributions_name_shows_all_that_it_offers_and_says_what_cannot_be_imported(
    here: EngineRegistry, capsys: pytest.CaptureFixture[str]
) -> None:
    output = shown(capsys, "rich-toy")
    assert "engine rich: rich" in output
    assert "options: the config of engine 'bad' of rich-toy 2.0 cannot be imported" in output


def test_in_full_too_requirements_are_said_to_be_met_or_not_and_broken_plugins_show_why(
    here: EngineRegistry, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "NOT MET (nobody-has-this not installed)" in shown(capsys, "lacking")
    output = shown(capsys, "runtime-toy")
    assert "status: broken" in output
    assert "mend: " in output
    assert "Traceback" in output


def test_a_kind_that_core_does_not_know_is_listed_as_such_and_is_healthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quiz = manifest("quiz", "acme_quiz", kind="examiner", summary="asks questions")
    install(tmp_path, "acme-quiz", {"acme_quiz.py": plugin(quiz), "acme_quiz_backend.py": BACKEND})
    monkeypatch.syspath_prepend(str(tmp_path))
    (entry,) = json.loads(shown(capsys, "--kind", "examiner", "--json", "acme-quiz", "--strict"))["entries"]
    assert (entry["kind"], entry["status"]) == ("examiner", "ok")
    assert entry["reason"] == "nothing in manymesh asks for a backend of this kind"
    assert "nothing in manymesh asks" in shown(capsys, "--kind", "examiner")
    assert "asks questions" in shown(capsys, "quiz")
    assert "quiz" not in shown(capsys, "--kind", "engine")
    with pytest.raises(SystemExit, match="2"):
        main(["--kind", "examinr"])
    assert "did you mean 'examiner'?" in capsys.readouterr().err
    forget(tmp_path)


def test_a_terminal_gets_long_texts_folded_to_its_width(
    here: EngineRegistry, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")
    wide = shown(capsys)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    narrow = shown(capsys)
    assert max(map(len, wide.splitlines())) > 120
    assert max(map(len, narrow.splitlines())) <= 120
    assert wide.split() == narrow.split()


def test_an_unknown_name_exits_2_with_the_nearest(here: EngineRegistry, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ritch"]) == 2
    output = capsys.readouterr().err
    assert "no plugin 'ritch' is installed" in output
    assert "did you mean 'rich'?" in output


def test_every_plugin_of_this_environment_can_be_shown_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    """Without torch: test_nothing_heavy_is_imported_by_a_listing."""
    for entry in EngineRegistry.discover({}).entries:
        (entry_in_json,) = json.loads(shown(capsys, f"{entry.distribution}:{entry.name}", "--json"))["entries"]
        assert entry_in_json["options_error"] == ""
        assert entry.name in shown(capsys, f"{entry.distribution}:{entry.name}")
