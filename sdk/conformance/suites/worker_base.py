"""What the suites share in which a trainer gives a rollout its weights, both in workers on Ray."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from tensordict import TensorDict

from core import LossSpec, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from core.registry import EngineRegistry
from core.rollout import LogProbKind, SamplingParams
from manymesh.recipes.grpo.config import PoolConfig
from manymesh.recipes.grpo.launch import ray_cluster
from manymesh.workers import RolloutWorkerConfig, TrainingWorkerConfig
from sdk.conformance.suites.rollout_base import RolloutSuite

ENVIRONMENT = {"OMP_NUM_THREADS": "1"}  # of the workers: what else they need comes from the process that runs the tests


class WorkerSuite(RolloutSuite):
    """A rollout in workers on Ray: that which is there, or one that the suite starts.

    Attributes:
        trainer: the engine that trains, by its name in the registry.
        trainer_config: its options, beside model and optimizer.
    """

    trainer: ClassVar[str] = "fsdp"
    trainer_config: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    @contextmanager
    def register_for_workers(cls) -> Iterator[str]:
        """The name by which workers that start in the block find the rollout."""
        yield cls.backend

    @classmethod
    def make_trainer_config(cls, model: str) -> TrainingWorkerConfig:
        """Raises RegistryError where there is no such trainer."""
        return TrainingWorkerConfig(
            backend=cls.trainer,
            engine={"model": model, "optimizer": {"lr": 1e-2}, **cls.trainer_config},
            loss=LossSpec("manymesh.recipes.grpo.loss:policy_loss"),
            device=cls.device,
            choice=EngineRegistry.get(cls.trainer).choice,
        )

    @classmethod
    def make_rollout_config(cls, backend: str, model: str) -> RolloutWorkerConfig:
        return RolloutWorkerConfig(backend, {"model": model, **cls.config}, bucket_mb=1, device=cls.device)

    @classmethod
    @contextmanager
    def start_groups(cls, **workers: tuple[int, RayClassWithInitArgs[Any]]) -> Iterator[dict[str, Any]]:
        """Worker groups by name, each with so many ranks in a pool of its own; models are not loaded."""
        with_gpu = cls.device != "cpu"
        sizes = [PoolConfig(processes=(size,), use_gpu=with_gpu) for size, _ in workers.values()]
        with ray_cluster(*sizes), ExitStack() as stack:
            groups = {}
            for name, (size, worker) in workers.items():
                pool = stack.enter_context(RayResourcePool([size], use_gpu=with_gpu))
                groups[name] = stack.enter_context(RayWorkerGroup(pool, worker, name=name, env=ENVIRONMENT))
            yield groups

    def sampling_to_score(self) -> SamplingParams:
        """Log-probabilities are of the kind that a trainer computes too."""
        temperature = 0.7 if LogProbKind.TEMPERATURE in self.kinds() else 1.0
        return self.sampling(num_samples=4, max_new_tokens=12, temperature=temperature, **self.seed(3))


def train(trainer: Any, rows: TensorDict, temperature: float) -> None:
    """One step on rows that a rollout gave, with advantages of both signs."""
    rows["old_log_probs"] = trainer.compute_log_prob(rows, temperature)["old_log_probs"]
    mask = rows["response_mask"]
    signs = torch.linspace(-1, 1, mask.values().numel())
    rows["advantages"] = torch.nested.nested_tensor_from_jagged(signs, mask.offsets())
    trainer.update_actor(rows, temperature=temperature)


def measure_disagreement(trainer: Any, rows: TensorDict, temperature: float) -> float:
    """Of the trainer's log-probabilities from the rollout's, the largest."""
    scores = trainer.compute_log_prob(rows, temperature)["old_log_probs"]
    columns = scores, rows["rollout_log_probs"], rows["response_mask"]
    ours, theirs, mask = (column.values() for column in columns)
    return float((ours - theirs)[mask].abs().max())
