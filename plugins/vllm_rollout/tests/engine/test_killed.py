"""A server's owner that is killed, and takes no leave of anybody."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from sdk.conformance.suites.rollout_base import Models

pytestmark = pytest.mark.timeout(600)  # processes that load vLLM start slowly on a busy machine

OWNER = """
import sys, time
from manymesh_vllm.config import VllmRolloutConfig
from manymesh_vllm.server import VllmServer

if __name__ == "__main__":
    options = {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 256, "kv_cache_mb": 16}
    server = VllmServer(VllmRolloutConfig(sys.argv[1], **options), device="cpu")  # nobody else holds it
    server.initialize()
    print("ready", flush=True)
    time.sleep(600)
"""


def test_no_process_outlives_a_killed_owner(models: Models, tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    command = [sys.executable, str(script), models.directory(1)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        try:
            assert any(line.strip() == "ready" for line in owner.stdout)
            children = psutil.Process(owner.pid).children(recursive=True)
        finally:
            owner.kill()
    names = sorted(each.name() for each in children if each.is_running())
    _, alive = psutil.wait_procs(children, timeout=30)
    for each in alive:
        each.kill()
    assert alive == []
    assert len(children) >= 2, names  # vLLM's engine, and Python's keeper of shared memory
