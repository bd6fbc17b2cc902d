"""The examples as a user runs them learn the demo's task: SGLang in the trainer's workers, and in another pool.

That takes minutes, so it is not in the base suite.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.examples import copy_digits


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("example", ["sglang.yaml", "sglang_two_pools.yaml"])
def test_the_examples_learn_to_copy_digits(tmp_path: Path, example: str) -> None:
    first, last = copy_digits(tmp_path, example, timeout_s=1480)
    assert first < 0.2
    assert last >= 0.9
