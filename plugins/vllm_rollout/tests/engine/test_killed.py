"""A server's owner that is killed, and takes no leave of anybody."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.timeout(600)  # processes that load vLLM start slowly on a busy machine

OWNER = """
import sys, time
from manymesh_vllm.config import VllmRolloutConfig
from manymesh_vllm.server import VllmServer

if __name__ == "__main__":
    options = {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 256, "kv_cache_mb": 16}
    VllmServer(VllmRolloutConfig(sys.argv[1], **options), device="cpu").initialize()
    print("ready", flush=True)
    time.sleep(600)
"""


def test_no_process_outlives_a_killed_owner(checkpoints: Callable[..., str], tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    with subprocess.Popen(
        [sys.executable, str(script), checkpoints(seed=1)], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        assert any(line.strip() == "ready" for line in owner.stdout)
        children = psutil.Process(owner.pid).children(recursive=True)
        assert len(children) >= 2  # vLLM's engine, and Python's keeper of shared memory
        owner.kill()
        owner.wait()
        owner.stdout.close()
    _, alive = psutil.wait_procs(children, timeout=20)
    for each in alive:
        each.kill()
    assert alive == []
