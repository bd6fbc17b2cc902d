"""From a run's config to its workers: what each part is built from, in which interpreter, and whether it all fits."""

from __future__ import annotations

import os
from math import gcd, lcm
from typing import Any

import attrs

from core.errors import ConfigError
from core.loss import LossSpec
from core.manifest import Kind, Plan
from core.model_facts import ModelFacts
from core.registry import Backend, EngineRegistry
from manymesh.pins import check_together
from manymesh.recipes.grpo.config import GrpoConfig, PoolConfig
from manymesh.workers.actor_rollout_ref import ActorRolloutRefConfig, Role
from manymesh.workers.rollout import RolloutWorkerConfig
from manymesh.workers.training import TrainingWorkerConfig


@attrs.frozen
class Placement:
    """The workers of a run. Starts no process.

    Attributes:
        elsewhere: the run is for another machine: what backends require may be missing here.
    """

    config: GrpoConfig
    elsewhere: bool = False

    def worker(self) -> ActorRolloutRefConfig:
        """What the workers of `pool` are built from."""
        config = self.config
        loss = LossSpec("manymesh.recipes.grpo.loss:policy_loss", attrs.asdict(config.loss))
        actor = attrs.evolve(self._placed(config.actor), loss=loss)
        ref = self._placed(config.ref or config.actor) if config.uses_ref else None
        if config.rollout_pool is not None:
            return ActorRolloutRefConfig(role=Role.ACTOR_REF if ref else Role.ACTOR, actor=actor, ref=ref)
        role = Role.ACTOR_ROLLOUT_REF if ref else Role.ACTOR_ROLLOUT
        return ActorRolloutRefConfig(role=role, actor=actor, ref=ref, rollout=self.rollout_worker())

    def rollout_worker(self) -> RolloutWorkerConfig:
        """What the rollout is built from, in either pool."""
        rollout: RolloutWorkerConfig = self._placed(self.config.rollout, self.config.rollout_pool)
        return rollout

    def python(self, part: str) -> str | None:
        """The interpreter of the workers that hold a part, "actor" or "rollout"; None for the driver's."""
        return self.pool(part).python

    def gpus_per_process(self, part: str) -> int:
        """GPUs of a process of the pool that holds a part, where it has any: as the config says, or as many as the
        backends in it use.

        Raises:
            Refused: the config says fewer.
        """
        pool = self.pool(part)
        used = {name: plan.gpus_per_process for name, plan in self._plans_in(pool).items()}
        most = max(used, key=used.__getitem__, default=part)
        needed = used.get(most, 1)
        if pool.gpus_per_process is not None and pool.gpus_per_process < needed and pool.use_gpu is not False:
            raise ConfigError(
                f"a process of the {most} uses {needed} GPUs",
                have=f"gpus_per_process {pool.gpus_per_process}",
                want=f"gpus_per_process {needed}, or null",
                where="pool" if pool is self.config.pool else "rollout_pool",
            )
        return pool.gpus_per_process or needed

    def environment(self, part: str) -> dict[str, str]:
        """Variables that the backends in the pool that holds a part want of its processes."""
        plans = self._plans_in(self.pool(part)).values()
        return {name: value for plan in plans for name, value in plan.environment.items()}

    def check(self) -> None:
        """Everything about models, backends and sizes that can be refused before a process is started.

        Raises:
            Refused: no model directory; a backend or transfer that is not there or refuses its options, the number
                of processes or the model; two that cannot share an environment; one that workers cannot run in, or
                variables that are not the user's; fewer GPUs than a process uses; or a number of prompts that doesn't
                divide.
        """
        config, worker = self.config, self.worker()
        for pool in filter(None, (config.pool, config.rollout_pool)):
            if pool.python is not None or pool.env:
                from core.transport.ray.environment import checked_python, checked_variables

                checked_variables(pool.env)
                if pool.python is not None:
                    checked_python(pool.python)
        if self.python("actor") == self.python("rollout"):
            engines = [_backend(engine.backend, "engine") for engine in (worker.actor, worker.ref) if engine]
            check_together([*engines, _backend(config.rollout.backend, "rollout")])
        if config.rollout_pool is not None:
            config.transfer.check()
        for part in ("actor", "rollout"):
            self.gpus_per_process(part)
        self._check_divides(worker)

    def _check_divides(self, worker: ActorRolloutRefConfig) -> None:
        config = self.config
        actor, rollout = self._dp_size("actor", worker.actor), self._dp_size("rollout", self.rollout_worker())
        parts = {"rollout": rollout, "actor": actor * config.algorithm.num_mini_batches}
        if worker.ref is not None:
            parts["ref"] = self._dp_size("ref", worker.ref)
        samples, prompts = config.sampling.num_samples, config.algorithm.prompts_per_step
        # The rollout is dealt prompts, the others rows.
        unit = lcm(*(size if part == "rollout" else size // gcd(size, samples) for part, size in parts.items()))
        if prompts % unit:
            near = [legal for legal in (prompts // unit * unit, (prompts // unit + 1) * unit) if legal]
            raise ConfigError(
                f"{prompts} prompts a step with {samples} samples each don't divide over the workers",
                have=f"algorithm.prompts_per_step {prompts}, num_mini_batches {config.algorithm.num_mini_batches}",
                want=f"prompts_per_step {' or '.join(map(str, near))} (a multiple of {unit})",
                where=f"dp {rollout} of the rollout, dp {actor} of the actor, {config.world_size} processes",
            )

    def _dp_size(self, part: str, worker: TrainingWorkerConfig | RolloutWorkerConfig | None) -> int:
        """Number of shards that a part cuts its rows into; 1 where its backend plans nothing."""
        plan = self._plan(part, worker)
        return plan.route.dp_size if plan else 1

    def _plans_in(self, pool: PoolConfig) -> dict[str, Plan]:
        """By part, of those in a pool whose backends plan."""
        worker = self.worker()
        workers = {"actor": worker.actor, "ref": worker.ref, "rollout": self.rollout_worker()}
        plans = {name: self._plan(name, each) for name, each in workers.items() if self.pool(name) is pool}
        return {name: plan for name, plan in plans.items() if plan}

    def _plan(self, part: str, worker: TrainingWorkerConfig | RolloutWorkerConfig | None) -> Plan | None:
        if worker is None:
            return None
        model = ModelFacts.read(worker.engine["model"])
        kind: Kind = "rollout" if part == "rollout" else "engine"
        backend = _backend(worker.backend, kind, elsewhere=self.elsewhere or self.python(part) is not None)
        return backend.plan(worker.engine, self.pool(part).world_size, model)

    def pool(self, part: str) -> PoolConfig:
        """The pool that holds a part."""
        return self.config.rollout_pool if part == "rollout" and self.config.rollout_pool else self.config.pool

    def _placed(self, worker: Any, pool: PoolConfig | None = None) -> Any:
        """A part's config with the model's directory, the CPU where the pool is denied GPUs, and the backend that this
        process finds, which workers then must have too."""
        path = str(worker.engine.get("model", self.config.model.path))
        device = worker.device or ("cpu" if (pool or self.config.pool).use_gpu is False else None)
        # Workers may run in another working directory.
        model = os.path.abspath(os.path.expanduser(path))
        kind: Kind = "rollout" if isinstance(worker, RolloutWorkerConfig) else "engine"
        choice = worker.choice or _backend(worker.backend, kind).choice
        return attrs.evolve(worker, engine={**worker.engine, "model": model}, device=device, choice=choice)


def _backend(name: str, kind: Kind, *, elsewhere: bool = True) -> Backend:
    return EngineRegistry.default().find(name, kind, elsewhere=elsewhere)
