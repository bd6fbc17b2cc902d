"""What `python -m sdk new` makes, as its author would publish it: wheels in a fresh environment with nothing but
manymesh, found, checked and trained with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sdk.scaffold.generate import generate
from sdk.scaffold.names import Names
from tests.test_wheels import CONFIG, MAKE_DATA, ROOT, run

EXAMPLE = ROOT / "examples/plugins/ddp_engine"
PLUGINS = (
    Names.of("acme-engine", "engine"),
    Names.of("manymesh-acme", "rollout"),
    Names.of("acme-transfer", "transfer"),
)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_new_plugins_install_as_wheels_pass_the_kit_and_train(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    for names in PLUGINS:
        generate(names, tmp_path / names.distribution)
        for command in (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]):
            run([sys.executable, "-m", *command], tmp_path / names.distribution)
    for project in (ROOT, *(tmp_path / names.distribution for names in PLUGINS)):
        run([sys.executable, "-m", "build", "--quiet", "--wheel", "--outdir", str(wheels), str(project)], ROOT)
    run([sys.executable, "-m", "venv", "env"], tmp_path)
    python, pip = str(tmp_path / "env/bin/python"), [str(tmp_path / "env/bin/python"), "-m", "pip", "install", "-q"]
    torch = next(line for line in (ROOT / "requirements/dev.txt").read_text().splitlines() if line.startswith("torch"))
    run([*pip, torch], tmp_path)
    distributions = [names.distribution for names in PLUGINS]
    run([*pip, "--find-links", str(wheels), *distributions, "pytest", "pytest-timeout"], tmp_path)

    entries = json.loads(run([python, "-m", "core.list_engines", "--json"], tmp_path))["entries"]
    assert {
        (entry["name"], entry["kind"], entry["status"]) for entry in entries if entry["distribution"] != "manymesh"
    } == {("acme-engine", "engine", "ok"), ("acme", "rollout", "ok"), ("acme-transfer", "transfer", "ok")}
    in_full = run([python, "-m", "core.list_engines", "acme-engine"], tmp_path)
    assert "gradient_checkpointing" in in_full
    assert "recompute each layer in backward" in in_full

    for names in PLUGINS:
        run([python, "-m", "sdk", "check", names.backend], tmp_path)
        # By the script, which leaves the folder off sys.path: the wheel is what is tested.
        output = run([str(tmp_path / "env/bin/pytest"), "-q"], tmp_path / names.distribution)
        assert f"conformance {names.backend} 0.1.0" in output
        assert " failed" not in output

    run([python, "-c", MAKE_DATA], tmp_path)
    config = CONFIG.replace("processes: [1]", "processes: [2]")
    (tmp_path / "config.yaml").write_text(f"{config}\nactor: {{backend: acme-engine}}\nrollout: {{backend: acme}}\n")
    run([python, "-m", "manymesh.recipes.grpo", "--config", "config.yaml"], tmp_path)
    steps = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_example_of_an_engine_on_ddp_passes_the_kit(tmp_path: Path) -> None:
    site = tmp_path / "site"
    install = ["install", "-q", "--no-deps", "--no-build-isolation", "--target", str(site), str(EXAMPLE)]
    run([sys.executable, "-m", "pip", *install], tmp_path)
    script = Path(sys.executable).with_name("pytest")
    process = subprocess.run(
        [str(script), "-q", "-p", "no:cacheprovider"],
        cwd=EXAMPLE,
        env=os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout[-4000:]
    assert "conformance ddp-engine 0.1.0" in process.stdout
