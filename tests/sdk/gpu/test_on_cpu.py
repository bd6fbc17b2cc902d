"""The program itself runs to its end on a CPU, in a process that has no Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from core.batch import objects
from core.transport.local import LocalWorkerGroup
from sdk.gpu.outline import STEPS
from tests.support.workers import Echo

ROOT = Path(__file__).parents[3]


def run_without_ray(folder: Path, *options: str, timeout_s: float) -> dict[str, object]:
    """The command with a package `ray` that cannot be imported; its report."""
    package = folder / "hidden" / "ray"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ModuleNotFoundError('ray is not here')")
    path = os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    process = subprocess.run(
        [sys.executable, "-m", "sdk", "gpu", "--device", "cpu", "--json", str(folder / "gpu.json"), *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert (folder / "gpu.json").exists(), process.stdout + process.stderr
    report: dict[str, object] = json.loads((folder / "gpu.json").read_text())
    assert process.returncode == (0 if report["passed"] else 1), process.stderr
    return report


def failures(report: dict[str, object]) -> list[str]:
    found = []
    for step in report["steps"]:  # type: ignore[attr-defined]
        found += [f"{note['name']}: {note['detail']}" for note in step["notes"] if note["outcome"] == "FAIL"]
        found += [f"{step['number']}: {step['message']}"] if step["message"] else []
    return found


def test_a_group_in_the_drivers_process_answers_object_columns_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    batch = TensorDict({"x": torch.zeros(2), "reason": NonTensorStack("stop", "length")}, batch_size=[2])
    with LocalWorkerGroup(Echo) as group:
        assert objects(group.echo(batch).get("reason")) == ["stop", "length"]


def test_steps_that_need_no_engine_run_without_ray(tmp_path: Path) -> None:
    report = run_without_ray(tmp_path, "--only", "02,03", timeout_s=150)
    assert failures(report) == []
    assert [step["outcome"] for step in report["steps"]] == ["PASS", "PASS"]  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_step_runs_to_its_end_on_a_cpu_without_ray(tmp_path: Path) -> None:
    report = run_without_ray(tmp_path, timeout_s=1700)
    assert failures(report) == []
    outcomes = {step["number"]: step["outcome"] for step in report["steps"]}  # type: ignore[attr-defined]
    assert list(outcomes) == [step.number for step in STEPS]
    absent = {number for number, outcome in outcomes.items() if outcome == "ABSENT"}
    assert absent <= {"11", "12"}, "steps that need what this environment lacks"
