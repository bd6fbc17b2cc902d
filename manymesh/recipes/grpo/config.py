"""A run's config: what YAML and overrides are structured into, and every check that needs no process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import gcd, lcm
from typing import Any

import attrs

from core.config import structure
from core.errors import ConfigError
from core.loss import LossSpec
from core.manifest import Kind
from core.model_facts import ModelFacts
from core.registry import Backend, EngineRegistry
from core.rollout import SamplingParams
from manymesh.pins import check_together
from manymesh.recipes.grpo.data import DataConfig
from manymesh.recipes.grpo.loss import PolicyLoss
from manymesh.recipes.grpo.reward import RewardConfig
from manymesh.workers.actor_rollout_ref import ActorRolloutRefConfig, Role
from manymesh.workers.rollout import RolloutWorkerConfig
from manymesh.workers.training import TrainingWorkerConfig
from manymesh.workers.transfer.sync import TransferConfig


@attrs.frozen
class ModelConfig:
    path: str  # directory of a Hugging Face checkpoint with its tokenizer


@attrs.frozen
class PoolConfig:
    """The workers' processes."""

    processes: tuple[int, ...] = (1,)  # by node
    use_gpu: bool | None = None  # a GPU for each process; null: where the cluster has GPUs
    cpus_per_process: float = 1  # that Ray sets aside, and torch's threads
    python: str | None = None  # interpreter of an environment of their own; null: the driver's

    @property
    def world_size(self) -> int:
        return sum(self.processes)


@attrs.frozen
class AlgorithmConfig:
    """What makes a step. It trains on prompts_per_step * sampling.num_samples rows."""

    prompts_per_step: int = 32
    num_mini_batches: int = 1  # optimizer steps of one pass over the rows
    epochs: int = 1  # passes over the rows
    divide_by_std: bool = True  # of a group's advantages
    eps: float = 1e-4  # added to the standard deviation

    def __attrs_post_init__(self) -> None:
        for name in ("prompts_per_step", "num_mini_batches", "epochs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"illegal {name}", have=getattr(self, name), want="at least 1")


@attrs.frozen
class RunConfig:
    """How long a run goes on, and what it leaves behind."""

    dir: str
    steps: int = 100
    seed: int = 0  # of sampling
    save_every: int = 50  # steps between checkpoints; there is one at the end too. 0: none at all
    keep_last: int = 2  # checkpoints
    stop_at_reward: float | None = None  # stop once the mean reward of the last stop_window steps is this high
    stop_window: int = 3
    num_samples: int = 4  # completions of a step that are written to samples.jsonl
    export: bool = True  # at the end write the policy as a Hugging Face directory, run.dir/model

    def __attrs_post_init__(self) -> None:
        for name, low in (("steps", 1), ("save_every", 0), ("keep_last", 1), ("stop_window", 1)):
            if getattr(self, name) < low:
                raise ConfigError(f"illegal {name}", have=getattr(self, name), want=f"at least {low}")


@attrs.frozen
class GrpoConfig:
    """The whole run. `model.path` is the actor's, the reference's and the rollout's where their engines
    name none."""

    model: ModelConfig
    data: DataConfig
    run: RunConfig
    reward: RewardConfig = attrs.field(factory=RewardConfig)
    pool: PoolConfig = attrs.field(factory=PoolConfig)
    actor: TrainingWorkerConfig = attrs.field(factory=TrainingWorkerConfig)
    ref: TrainingWorkerConfig | None = None  # null: as the actor. Built only with loss.kl_coef
    rollout: RolloutWorkerConfig = attrs.field(factory=RolloutWorkerConfig)
    rollout_pool: PoolConfig | None = None  # null: the rollout lives in the processes of `pool`
    transfer: TransferConfig = attrs.field(factory=TransferConfig)  # of weights to rollout_pool
    sampling: SamplingParams = attrs.field(factory=lambda: SamplingParams(num_samples=8))
    algorithm: AlgorithmConfig = attrs.field(factory=AlgorithmConfig)
    loss: PolicyLoss = attrs.field(factory=PolicyLoss)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> GrpoConfig:
        """Structure plain data.

        Raises:
            ConfigError: with the path of what is wrong.
        """
        return structure(cls, data)

    def __attrs_post_init__(self) -> None:
        if self.sampling.temperature == 0:
            raise ConfigError(
                "sampling.temperature 0 is greedy: all samples of a prompt would be the same",
                have=0,
                want="above 0",
                where="sampling.temperature",
            )
        if self.sampling.num_samples < 2:
            raise ConfigError(
                "GRPO compares the samples of a prompt with each other",
                have=self.sampling.num_samples,
                want="at least 2",
                where="sampling.num_samples",
            )
        if self.actor.loss is not None:
            raise ConfigError("the policy's loss is set under `loss`", have=self.actor.loss, where="actor.loss")

    @property
    def uses_ref(self) -> bool:
        """Whether a step needs the reference policy."""
        return self.loss.kl_coef > 0

    @property
    def world_size(self) -> int:
        """Processes of all pools."""
        return self.pool.world_size + (self.rollout_pool.world_size if self.rollout_pool else 0)

    def worker(self) -> ActorRolloutRefConfig:
        """What the workers of `pool` are made from."""
        options = attrs.asdict(self.loss)
        actor = attrs.evolve(self._placed(self.actor), loss=LossSpec("manymesh.recipes.grpo.loss:policy_loss", options))
        ref = self._placed(self.ref or self.actor) if self.uses_ref else None
        if self.rollout_pool is not None:
            return ActorRolloutRefConfig(role=Role.ACTOR_REF if ref else Role.ACTOR, actor=actor, ref=ref)
        role = Role.ACTOR_ROLLOUT_REF if ref else Role.ACTOR_ROLLOUT
        return ActorRolloutRefConfig(role=role, actor=actor, ref=ref, rollout=self.rollout_worker())

    def rollout_worker(self) -> RolloutWorkerConfig:
        """What the rollout is made from, in either pool."""
        made: RolloutWorkerConfig = self._placed(self.rollout, self.rollout_pool)
        return made

    def python(self, part: str) -> str | None:
        """The interpreter of the workers that hold a part, "actor" or "rollout"; None for the driver's."""
        return self._pool(part).python

    def _pool(self, part: str) -> PoolConfig:
        return self.rollout_pool if part == "rollout" and self.rollout_pool else self.pool

    def check(self) -> None:
        """Everything about models, backends and sizes that can be refused before a process is started.

        Raises:
            Refused: no model directory; a backend or transfer that is not there or refuses its options, the number
                of processes or the model; two that cannot share an environment; one that workers cannot run in; or a
                number of prompts that doesn't divide.
        """
        worker = self.worker()
        for python in {self.python("actor"), self.python("rollout")} - {None}:
            from core.transport.ray.environment import checked_python

            checked_python(str(python))
        if self.python("actor") == self.python("rollout"):
            engines = [_found(part.backend, "engine") for part in (worker.actor, worker.ref) if part]
            check_together([*engines, _found(self.rollout.backend, "rollout")])
        if self.rollout_pool is not None:
            self.transfer.check()
        actor, rollout = self._dp_size("actor", worker.actor), self._dp_size("rollout", self.rollout_worker())
        parts = {"rollout": rollout, "actor": actor * self.algorithm.num_mini_batches}
        if worker.ref is not None:
            parts["ref"] = self._dp_size("ref", worker.ref)
        samples, prompts = self.sampling.num_samples, self.algorithm.prompts_per_step
        # The rollout is dealt prompts, the others rows.
        unit = lcm(*(n if part == "rollout" else n // gcd(n, samples) for part, n in parts.items()))
        if prompts % unit:
            near = [each for each in (prompts // unit * unit, (prompts // unit + 1) * unit) if each]
            raise ConfigError(
                f"{prompts} prompts a step with {samples} samples each don't divide over the workers",
                have=f"algorithm.prompts_per_step {prompts}, num_mini_batches {self.algorithm.num_mini_batches}",
                want=f"prompts_per_step {' or '.join(map(str, near))} (a multiple of {unit})",
                where=f"dp {rollout} of the rollout, dp {actor} of the actor, {self.world_size} processes",
            )

    def _dp_size(self, part: str, config: TrainingWorkerConfig | RolloutWorkerConfig | None) -> int:
        """Number of shards that a part cuts its rows into; 1 where its backend plans nothing."""
        if config is None:
            return 1
        model = ModelFacts.read(config.engine["model"])
        kind: Kind = "rollout" if part == "rollout" else "engine"
        backend = _found(config.backend, kind, elsewhere=self.python(part) is not None)
        plan = backend.plan(config.engine, self._pool(part).world_size, model)
        return plan.route.dp_size if plan else 1

    def _placed(self, config: Any, pool: PoolConfig | None = None) -> Any:
        """With the model's directory, the CPU where the pool is denied GPUs, and the backend that this process finds,
        which workers then must have too."""
        path = str(config.engine.get("model", self.model.path))
        device = config.device or ("cpu" if (pool or self.pool).use_gpu is False else None)
        # Workers may run in another working directory.
        model = os.path.abspath(os.path.expanduser(path))
        kind: Kind = "rollout" if isinstance(config, RolloutWorkerConfig) else "engine"
        choice = config.choice or _found(config.backend, kind).choice
        return attrs.evolve(config, engine={**config.engine, "model": model}, device=device, choice=choice)


def _found(name: str, kind: Kind, *, elsewhere: bool = True) -> Backend:
    return EngineRegistry.default().find(name, kind, elsewhere=elsewhere)
