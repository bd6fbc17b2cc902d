"""A driver's mistakes as its author's type checker sees them: mypy, strict, without a plugin.

What right calls give is in tests/typing/driver.py, which mypy checks with everything else.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = [pytest.mark.ci, pytest.mark.timeout(600)]

CONFIG = """
[mypy]
strict = true
namespace_packages = true
explicit_package_bases = true
mypy_path = {root}
[mypy-core.*]
ignore_errors = true
[mypy-ray.*,torch.*,tensordict.*,numpy.*]
follow_imports = skip
ignore_missing_imports = true
"""

DRIVER = """
from core import LocalWorkerGroup, RayClassWithInitArgs, SamplingParams, Worker, WorkerGroup, on_mesh, register
from core import TypoInAName  # error: TypoInAName


class Scorer(Worker):
    def __init__(self, size: int) -> None: ...

    @register()
    def ping(self, count: int) -> int:
        return count

    @register(on_mesh("score"))
    def score(self, rows: SamplingParams, factor: float = 1.0) -> SamplingParams:
        return rows

    @register(on_mesh("score"), colums=["x"])  # error: colums
    def wrong(self, rows: SamplingParams) -> SamplingParams:
        return rows


def calls(group: WorkerGroup[Scorer], rows: SamplingParams) -> None:
    workers = group.workers
    workers.pong()  # error: pong
    workers.ping()  # error: count
    workers.ping("3")  # error: str
    workers.ping.later(counter=3)  # error: counter
    number: int = workers.ping(3)  # error: list[int]
    workers.score(7)  # error: int
    workers.score(rows, "2")  # error: str
    workers.score(workers.score.later(rows), "2")  # error: str
    workers.score(rows, workers.score.later(rows))  # error: Future
    names: list[str] = workers.score.later(rows).result()  # error: SamplingParams
    RayClassWithInitArgs(Scorer, "3")  # error: str
    LocalWorkerGroup(Scorer, 3, world_sise=2)  # error: world_sise
"""


def test_wrong_calls_of_a_group_are_errors_and_nothing_else_is(tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(DRIVER)
    (tmp_path / "mypy.ini").write_text(CONFIG.format(root=ROOT))
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--no-error-summary", "driver.py"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    lines: dict[int, str] = {}
    for number, text in re.findall(r"^driver\.py:(\d+): (.*)$", process.stdout, re.MULTILINE):
        lines[int(number)] = lines.get(int(number), "") + text
    expected = {
        number: line.partition("# error: ")[2]
        for number, line in enumerate(DRIVER.splitlines(), 1)
        if "# error: " in line
    }
    assert set(lines) == set(expected), process.stdout + process.stderr
    assert {number: word for number, word in expected.items() if word not in lines[number]} == {}
