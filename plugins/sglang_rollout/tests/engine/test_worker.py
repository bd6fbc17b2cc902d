"""Trainer and SGLang in the same Ray actors: the numbers of one are the numbers of the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
from tensordict import TensorDict

from core import LossSpec, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from core.errors import Refused
from core.rollout import SamplingParams
from manymesh.workers import (
    ActorRolloutRefConfig,
    ActorRolloutRefWorker,
    RolloutWorkerConfig,
    TrainingWorkerConfig,
    WeightSync,
)
from sdk.conformance.suites.rollout_base import Models, prompts

SAMPLING = SamplingParams(num_samples=4, max_new_tokens=12, temperature=0.7, seed=3)


@pytest.fixture(scope="module")
def group(models: Models) -> Iterator[Any]:
    """Two ranks: the policy sharded over both (FSDP, dp 2), an SGLang engine on each."""
    model = models.directory(1, tie_word_embeddings=True)
    config = ActorRolloutRefConfig(
        role="actor_rollout",  # type: ignore[arg-type]
        actor=TrainingWorkerConfig(
            backend="fsdp",
            engine={"model": model, "optimizer": {"lr": 1e-2}},
            loss=LossSpec("manymesh.recipes.grpo.loss:policy_loss"),
        ),
        rollout=RolloutWorkerConfig(
            backend="sglang",
            engine={"model": model, "max_model_len": 128, "max_num_seqs": 16, "kv_cache_tokens": 2048},
            bucket_mb=1,
        ),
    )
    ray.init(num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False, configure_logging=False)
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    worker = RayClassWithInitArgs(ActorRolloutRefWorker, config)
    with RayResourcePool([2]) as pool, RayWorkerGroup(pool, worker, env=environment) as workers:
        workers.init_model()
        yield workers
    ray.shutdown()


def disagreement(group: Any, batch: TensorDict) -> float:
    """Of the trainer's log-probabilities from the rollout's, the largest."""
    scores = group.compute_log_prob(batch, SAMPLING.temperature)["old_log_probs"]
    columns = scores, batch["rollout_log_probs"], batch["response_mask"]
    ours, theirs, mask = (column.values() for column in columns)
    return float((ours - theirs)[mask].abs().max())


@pytest.mark.timeout(900)
def test_policy_and_rollout_agree_after_each_update_and_only_then(group: Any) -> None:
    batch_of_prompts = prompts([1, 5, 6], [7], [40, 41, 42], [9, 9])
    sync = WeightSync(group, group)
    assert sync.sync() == 0
    batch = group.generate_sequences(batch_of_prompts, SAMPLING)
    assert batch["prompt_id"].tolist() == [i for i in range(4) for _ in range(4)]
    assert disagreement(group, batch) < 1e-4

    batch["old_log_probs"] = group.compute_log_prob(batch, SAMPLING.temperature)["old_log_probs"]
    signs = torch.linspace(-1, 1, batch["response_mask"].values().numel())
    batch["advantages"] = torch.nested.nested_tensor_from_jagged(signs, batch["response_mask"].offsets())
    group.update_actor(batch, temperature=SAMPLING.temperature)
    stale = group.generate_sequences(batch_of_prompts, SAMPLING, min_version=0)
    assert stale["weight_version"].tolist() == [0] * 16
    assert disagreement(group, stale) > 1e-2
    with pytest.raises(Refused, match="too old"):
        group.generate_sequences(batch_of_prompts, SAMPLING)

    assert sync.sync() == 1
    fresh = group.generate_sequences(batch_of_prompts, SAMPLING)
    assert fresh["weight_version"].tolist() == [1] * 16
    assert disagreement(group, fresh) < 1e-4
