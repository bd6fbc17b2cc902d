"""The demo as a user runs it: minutes, so not in the base suite."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from manymesh.recipes.grpo.tracking import TIME, read_metrics

MEGATRON = Path(__file__).parents[2] / "examples" / "grpo" / "megatron.yaml"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def command(directory: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "manymesh.recipes.demo", "--dir", str(directory), *arguments]


@pytest.mark.parametrize("seed", range(5))
def test_the_demo_learns_to_copy_digits_within_two_minutes(seed: int, tmp_path: Path) -> None:
    learns_to_copy_digits(tmp_path / "run", f"--seed={seed}")


def test_it_learns_just_so_in_tensor_and_pipeline_parallel_parts_on_four_workers(tmp_path: Path) -> None:
    learns_to_copy_digits(tmp_path / "run", f"--config={MEGATRON}")


def learns_to_copy_digits(directory: Path, *arguments: str) -> None:
    process = subprocess.run(command(directory, *arguments), capture_output=True, text=True, timeout=390)
    assert process.returncode == 0, process.stderr
    rewards = re.search(r"^reward (\S+) -> (\S+) in", process.stdout, re.MULTILINE)
    seconds = re.search(r"^all in all (\S+) s$", process.stdout, re.MULTILINE)
    assert rewards
    assert seconds
    assert float(rewards[1]) < 0.2
    assert float(rewards[2]) >= 0.9
    assert float(seconds[1]) < 120
    assert (directory / "reward.png").exists()


def test_ctrl_c_ends_all_processes_and_says_how_to_go_on(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    process = subprocess.Popen(
        command(directory, "run.save_every=2"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    deadline = time.monotonic() + 120
    while len(read_metrics(directory / "metrics.jsonl")) < 3 and time.monotonic() < deadline:
        time.sleep(0.2)
    children = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    again = re.search(r"goes on: \S+ -m (manymesh.recipes.grpo --config \S+ --resume)", output)
    assert again, output
    assert "Traceback" not in output
    assert len(children) > 2
    assert not [pid for pid in children if alive(pid)]

    steps = len(read_metrics(directory / "metrics.jsonl")) + 1
    subprocess.run([sys.executable, "-m", *again[1].split(), f"run.steps={steps}"], check=True, timeout=200)
    assert [line["step"] for line in read_metrics(directory / "metrics.jsonl")] == list(range(1, steps + 1))


def test_a_run_in_parallel_parts_that_is_resumed_goes_on_as_one_that_was_never_stopped(tmp_path: Path) -> None:
    at_once, in_two = tmp_path / "at_once", tmp_path / "in_two"
    for directory, steps in ((at_once, 4), (in_two, 2)):
        subprocess.run(
            command(directory, f"--config={MEGATRON}", "run.save_every=2", f"run.steps={steps}"),
            check=True,
            timeout=200,
        )
    again = ["-m", "manymesh.recipes.grpo", "--config", str(in_two / "config.yaml"), "--resume", "run.steps=4"]
    subprocess.run([sys.executable, *again], check=True, timeout=200)
    lines, want = timeless(in_two), timeless(at_once)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines == [pytest.approx(each, rel=1e-6) for each in want]


def timeless(directory: Path) -> list[dict[str, Any]]:
    """The run's metrics without those that are times."""
    lines = read_metrics(directory / "metrics.jsonl")
    return [{key: value for key, value in line.items() if not key.startswith(TIME)} for line in lines]


def descendants(pid: int) -> list[int]:
    table = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = [tuple(map(int, line.split())) for line in table.splitlines()]
    pids = [pid]
    for parent in pids:
        pids += [child for child, its_parent in parents if its_parent == parent]
    return pids[1:]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
