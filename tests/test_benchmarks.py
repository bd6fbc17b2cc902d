"""Benchmarks that run: each has both sides and an interval. Their figures are for `make bench`, on a quiet machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[1]
IN_ENVIRONMENTS_OF_THEIR_OWN = {"vllm_rollout", "sglang_rollout"}
NAMES = sorted({path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py")} - IN_ENVIRONMENTS_OF_THEIR_OWN)


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_times_both_sides_of_all_its_cases(name: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--pairs", "6", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    report, _ = json.JSONDecoder().raw_decode(done.stdout, done.stdout.index("{"))  # Ray may print below
    assert report["cases"]
    assert all(case["floor_ms"] > 0 and case["ours_ms"] > 0 for case in report["cases"])
