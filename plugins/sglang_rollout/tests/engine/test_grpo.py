"""The examples as a user runs them learn the demo's task: SGLang in the trainer's workers, and in another pool.

That takes minutes, so it is not in the base suite.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[4] / "examples" / "grpo"


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("example", ["sglang.yaml", "sglang_two_pools.yaml"])
def test_the_examples_learn_to_copy_digits(tmp_path: Path, example: str) -> None:
    def run(*arguments: str) -> str:
        process = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=1480
        )
        assert process.returncode == 0, process.stderr[-4000:]
        return process.stdout

    run(str(EXAMPLES / "make_copy_task.py"))
    output = run("-m", "manymesh.recipes.grpo", "--config", str(EXAMPLES / example))
    rewards = re.search(r"^reward (\S+) -> (\S+) in", output, re.MULTILINE)
    assert rewards
    assert float(rewards[1]) < 0.2
    assert float(rewards[2]) >= 0.9
