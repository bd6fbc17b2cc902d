"""A run's config: what YAML and overrides are structured into. What it means for workers is in placement.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from core.config import structure
from core.errors import ConfigError
from core.rollout import SamplingParams
from manymesh.recipes.grpo.data import DataConfig
from manymesh.recipes.grpo.loss import PolicyLoss
from manymesh.recipes.grpo.reward import RewardConfig
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
    use_gpu: bool | None = None  # GPUs for each process; null: where the cluster has GPUs
    gpus_per_process: int | None = None  # null: as many as the backends use, mostly 1
    all_devices_visible: bool = False  # each process sees all GPUs of its node, and uses its own
    cpus_per_process: float | None = None  # that Ray sets aside, and torch's threads; null: 1, beside GPUs up to 8
    python: str | None = None  # interpreter of an environment of their own; null: the driver's
    env: Mapping[str, str] = attrs.field(factory=dict)  # environment variables, such as NCCL_DEBUG or HF_HOME
    placement_timeout_s: float = 30.0  # until other pools have given back the room
    start_timeout_s: float = 300.0  # until the processes are there
    call_timeout_s: float = 7200.0  # of each call, such as a step's update or loading the model
    shutdown_timeout_s: float = 20.0  # until the workers have freed what they hold

    def __attrs_post_init__(self) -> None:
        for name in ("placement_timeout_s", "start_timeout_s", "call_timeout_s", "shutdown_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"illegal {name}", have=getattr(self, name), want="seconds, above 0")
        if self.gpus_per_process is not None and self.gpus_per_process < 1:
            raise ConfigError(
                "illegal gpus_per_process", have=self.gpus_per_process, want="at least 1, or use_gpu=false"
            )

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
    """The whole run. `model.path` is the actor's, the reference's and the rollout's where their engines name none."""

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
