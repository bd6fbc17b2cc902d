"""As users install it: wheels in a fresh environment, outside of the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

MAKE_DATA = """
from manymesh.recipes.toy import write_copy_task, write_model
write_model("model")
write_copy_task("copy.jsonl", num_rows=64)
"""
CONFIG = """
model: {path: model}
data: {path: copy.jsonl}
reward: {function: "manymesh.recipes.grpo.reward:digit_share"}
pool: {processes: [1], use_gpu: false}
sampling: {num_samples: 4, max_new_tokens: 4}
algorithm: {prompts_per_step: 4}
run: {dir: run, steps: 2}
"""


def run(command: list[str], where: Path) -> str:
    """Standard output of a process that knows nothing of this checkout or its environment."""
    hidden = {"PYTHONPATH", "VIRTUAL_ENV", "RAY_ADDRESS"}
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    process = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, timeout=900)
    assert process.returncode == 0, (process.stdout + process.stderr)[-4000:]
    return process.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_wheels_install_in_a_fresh_environment_list_their_engines_and_train(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    for project in (
        ".",
        "plugins/fsdp",
        "plugins/hf_rollout",
        "plugins/megatron",
        "plugins/sglang_rollout",
        "plugins/vllm_rollout",
    ):
        build = ["-m", "build", "--quiet", "--wheel", "--outdir", str(wheels), str(ROOT / project)]
        run([sys.executable, *build], ROOT)
    assert sorted(wheel.name.partition("-")[0] for wheel in wheels.iterdir()) == [
        "manymesh",
        "manymesh_fsdp",
        "manymesh_hf",
        "manymesh_megatron",
        "manymesh_sglang",
        "manymesh_vllm",
    ]
    run([sys.executable, "-m", "venv", "env"], tmp_path)
    python = str(tmp_path / "env/bin/python")
    torch = next(line for line in (ROOT / "requirements/dev.txt").read_text().splitlines() if line.startswith("torch"))
    run([python, "-m", "pip", "install", "--quiet", torch], tmp_path)
    run(
        [
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--find-links",
            str(wheels),
            "manymesh[fsdp,hf,megatron,sglang,vllm]",
        ],
        tmp_path,
    )

    entries = json.loads(run([python, "-m", "core.list_engines", "--json"], tmp_path))
    assert [(each["name"], each["status"]) for each in entries["entries"]] == [
        ("collective", "ok"),
        ("disk", "ok"),
        ("fsdp", "ok"),
        ("hf", "ok"),
        ("ipc", "ok"),
        ("megatron", "ok"),
        ("object_store", "ok"),
        ("sglang", "missing-dependency"),
        ("sglang_server", "missing-dependency"),
        ("vllm", "missing-dependency"),
        ("vllm_server", "missing-dependency"),
    ]
    assert not run([python, "-c", "import core; print(core.__file__)"], tmp_path).startswith(str(ROOT))

    run([python, "-c", MAKE_DATA], tmp_path)
    (tmp_path / "config.yaml").write_text(CONFIG)
    run([python, "-m", "manymesh.recipes.grpo", "--config", "config.yaml"], tmp_path)
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2
