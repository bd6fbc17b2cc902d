"""The examples of examples/grpo as a user runs them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples" / "grpo"


def copy_digits(directory: Path, example: str, *overrides: str, timeout_s: float) -> tuple[float, float]:
    """Run an example on the task of copying digits, in processes of its own: the mean reward of its first step and of
    its last."""

    def run(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=timeout_s, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    run(str(EXAMPLES / "make_copy_task.py"))
    said = run("-m", "manymesh.recipes.grpo", "--config", str(EXAMPLES / example), *overrides)
    rewards = re.search(r"^reward (\S+) -> (\S+) in", said, re.MULTILINE)
    assert rewards, said[-4000:]
    return float(rewards[1]), float(rewards[2])
