"""The examples as a user runs them: a policy in vLLM's own processes or in another pool learns the demo's task.
Learning takes minutes, so it is not in the base suite."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
import ray
from rich.console import Console

from manymesh.recipes.grpo.config import GrpoConfig
from manymesh.recipes.grpo.launch import worker_group
from manymesh.recipes.grpo.tracking import REWARD, read_metrics
from manymesh.recipes.grpo.trainer import GrpoTrainer
from manymesh.recipes.toy import write_copy_task, write_model
from manymesh.recipes.yaml_config import load_yaml, override
from tests.support.examples import EXAMPLES, copy_digits


@pytest.mark.timeout(600)  # processes that load vLLM start slowly on a busy machine
def test_megatron_and_vllm_cut_over_the_same_two_ranks_agree_and_begin_to_learn(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", hidden_size=128)
    data = write_copy_task(tmp_path / "copy.jsonl")
    options = [f"model.path={model}", f"data.path={data}", f"run.dir={tmp_path / 'run'}", "run.steps=6"]
    config = GrpoConfig.of(override(load_yaml(EXAMPLES / "megatron_vllm.yaml"), options))
    trainer = GrpoTrainer(config)
    ray.init(num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        with worker_group(config) as workers:
            trainer.run(workers, Console(file=StringIO()))
            group = workers.trainers
            actor, rollout = group.route("actor"), group.route("rollout")
    finally:
        ray.shutdown()
    assert (actor.dp_size, actor.collected, rollout.dp_size, rollout.collected) == (1, {0}, 1, {0})
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    rewards = [line[REWARD] for line in metrics]
    assert len(rewards) == 6
    assert max(line["rollout/log_prob_gap_max"] for line in metrics) < 1e-4
    assert rewards[0] < 0.1
    assert min(rewards[-2:]) > rewards[0] + 0.03


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "example",
    [
        ["vllm.yaml"],
        ["vllm_two_pools.yaml", "transfer.kind=collective"],
        ["vllm_two_pools.yaml", "transfer.kind=object_store"],
        ["megatron_vllm.yaml"],
        ["megatron_vllm.yaml", "rollout_pool={processes: [1], use_gpu: false}", "rollout.engine.tensor_parallel=1"],
    ],
    ids=" ".join,
)
def test_the_examples_learn_to_copy_digits(tmp_path: Path, example: list[str]) -> None:
    first, last = copy_digits(tmp_path, *example, timeout_s=880)
    assert first < 0.2
    assert last >= 0.9
