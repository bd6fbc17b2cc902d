"""A server whose replica is cut over two processes, in a process of its own: what it samples, and that none is left."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import attrs
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from sdk.conformance.suites.rollout_base import Models

pytestmark = pytest.mark.timeout(600)  # processes that load vLLM start slowly on a busy machine

PROMPTS = [[1, 5, 6, 9], [7]]
OWNER = """
import json, sys, time
import torch
from safetensors.torch import load_file
from tensordict import TensorDict
from core.batch import jagged
from core.engine import WeightSpec
from core.rollout import SamplingParams
from manymesh_vllm.config import VllmServerConfig
from manymesh_vllm.server_rollout import VllmServerRollout

if __name__ == "__main__":
    first, second, prompts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    options = {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 256, "kv_cache_mb": 16}
    # Nobody else holds it.
    server = VllmServerRollout(VllmServerConfig(first, tensor_parallel=2, **options), device="cpu")
    server.initialize()
    batch = TensorDict({"prompt_ids": jagged(list(map(torch.tensor, prompts)))}, batch_size=[len(prompts)])

    def say():
        rows = server.generate(batch, SamplingParams(num_samples=2, max_new_tokens=8, temperature=0.7, seed=1))
        columns = (rows[name].unbind() for name in ("input_ids", "rollout_log_probs"))
        print(json.dumps([[column.tolist() for column in row] for row in zip(*columns)]), flush=True)

    say()
    weights = list(load_file(second + "/model.safetensors").items())
    server.begin_weight_update([WeightSpec(name, tuple(t.shape), "float32") for name, t in weights], 1)
    for i in range(0, len(weights), 4):
        server.load_bucket(weights[i : i + 4])
    server.finish_weight_update()
    say()
    time.sleep(600)
"""


@attrs.frozen
class Owner:
    process: subprocess.Popen[str]
    children: list[psutil.Process]
    generations: list[Any]


@pytest.fixture(scope="module")
def owner(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owner]:
    script = tmp_path_factory.mktemp("owner") / "owner.py"
    script.write_text(OWNER)
    command = [sys.executable, str(script), models.directory(1), models.directory(2), json.dumps(PROMPTS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            generations = [json.loads(line) for line in islice(_lists(process.stdout), 2)]
            yield Owner(process, psutil.Process(process.pid).children(recursive=True), generations)
        finally:
            process.kill()


def _lists(lines: Iterator[str]) -> Iterator[str]:
    return (line for line in lines if line.startswith("[["))


def test_a_replica_cut_over_two_processes_has_the_models_log_probs_before_and_after_an_update(
    owner: Owner, models: Models
) -> None:
    assert len(owner.generations) == 2
    for rows, number in zip(owner.generations, (1, 2), strict=True):
        model: Any = AutoModelForCausalLM.from_pretrained(models.directory(number), dtype=torch.float32).eval()
        for (ids, log_probs), prompt in zip(rows, [prompt for prompt in PROMPTS for _ in range(2)], strict=True):
            assert ids[: len(prompt)] == prompt
            assert len(ids) > len(prompt)
            with torch.no_grad():
                table = (model(torch.tensor([ids])).logits[0, :-1] / 0.7).log_softmax(-1)
            want = table.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            assert (want - torch.tensor(log_probs[1:]))[len(prompt) - 1 :].abs().max() < 1e-4


def test_no_process_outlives_a_killed_owner(owner: Owner) -> None:
    owner.process.kill()
    owner.process.wait()
    _, alive = psutil.wait_procs(owner.children, timeout=30)
    for each in alive:
        each.kill()
    assert alive == []
    assert len(owner.children) >= 4  # vLLM's engine, its two workers, and Python's keepers of shared memory
