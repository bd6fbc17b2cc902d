"""A rollout in the trainer's own workers: the numbers of one are the numbers of the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from core import RayClassWithInitArgs
from core.errors import Refused
from manymesh.workers import ActorRolloutRefConfig, ActorRolloutRefWorker, Role, WeightSync
from sdk.conformance.suites.rollout_base import prompts
from sdk.conformance.suites.worker_base import WorkerSuite, measure_disagreement, train

PROMPTS = [[1, 5, 6], [7], [40, 41, 42], [9, 9]]
NUM_ROWS = 16


class ColocatedSuite(WorkerSuite):
    @contextmanager
    def start_workers(self, world_size: int) -> Iterator[Any]:
        """Each rank has a share of the policy, and of the rollout what its planner gives it."""
        model = self.models.directory(1, tie_word_embeddings=True)
        trainer_config = self.make_trainer_config(model)
        with self.register_for_workers() as backend:
            config = ActorRolloutRefConfig(Role.ACTOR_ROLLOUT, trainer_config, self.make_rollout_config(backend, model))
            worker = RayClassWithInitArgs(ActorRolloutRefWorker, config)
            with self.start_groups(workers=(world_size, worker)) as groups:
                groups["workers"].init_model()
                yield groups["workers"]

    def test_policy_and_rollout_agree_after_each_update_and_only_then(self, world_size: int) -> None:
        sampling, batch = self.sampling_to_score(), prompts(*PROMPTS)
        temperature = sampling.temperature
        with self.start_workers(world_size) as workers:
            sync = WeightSync(workers, workers)
            assert sync.sync() == 0
            rows = workers.generate_sequences(batch, sampling)
            assert rows["prompt_id"].tolist() == [i for i in range(4) for _ in range(4)]
            assert measure_disagreement(workers, rows, temperature) < 1e-4

            train(workers, rows, temperature)
            stale = workers.generate_sequences(batch, sampling, min_version=0)
            assert stale["weight_version"].tolist() == [0] * NUM_ROWS
            assert measure_disagreement(workers, stale, temperature) > 1e-2
            with pytest.raises(Refused, match="too old"):
                workers.generate_sequences(batch, sampling)

            assert sync.sync() == 1
            fresh = workers.generate_sequences(batch, sampling)
            assert fresh["weight_version"].tolist() == [1] * NUM_ROWS
            assert measure_disagreement(workers, fresh, temperature) < 1e-4
