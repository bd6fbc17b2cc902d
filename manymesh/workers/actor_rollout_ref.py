"""ActorRolloutRefWorker: policy, reference and rollout in one process, in the role that the config gives it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import attrs
from tensordict import TensorDict

from core.config import structure
from core.dispatch import Dispatch, on_mesh, register
from core.errors import ConfigError, Refused, did_you_mean
from core.loss import LossFn, LossSpec, Metric
from core.manifest import Kind
from core.rollout import Rollout
from manymesh.parts.rollout_checks import resume_memory
from manymesh.workers.rollout import GeneratingWorker, RolloutWorkerConfig
from manymesh.workers.training import TrainingWorker, TrainingWorkerConfig
from manymesh.workers.transfer.buckets import whole_tensors
from manymesh.workers.transfer.remote import WeightSource

# What a log-probability is computed of. Model inputs and the weights of rows go with them.
TOKENS = ("input_ids", "attention_mask", "rollout_temperature")


class Role(StrEnum):
    """What a worker holds."""

    ACTOR = "actor"
    ROLLOUT = "rollout"
    REF = "ref"
    ACTOR_REF = "actor_ref"
    ACTOR_ROLLOUT = "actor_rollout"
    ACTOR_ROLLOUT_REF = "actor_rollout_ref"

    @property
    def parts(self) -> frozenset[str]:
        """Of "actor", "rollout", "ref"."""
        return _PARTS[self]


_PARTS: Mapping[Role, frozenset[str]] = {
    Role.ACTOR: frozenset({"actor"}),
    Role.ROLLOUT: frozenset({"rollout"}),
    Role.REF: frozenset({"ref"}),
    Role.ACTOR_REF: frozenset({"actor", "ref"}),
    Role.ACTOR_ROLLOUT: frozenset({"actor", "rollout"}),
    Role.ACTOR_ROLLOUT_REF: frozenset({"actor", "rollout", "ref"}),
}


def _role(name: str) -> Role:
    try:
        return Role(name)
    except ValueError as error:
        raise ConfigError(f"unknown role {name!r}", mend=did_you_mean(name, [role.value for role in Role])) from error


@attrs.frozen
class ActorRolloutRefConfig:
    """Which parts a worker has, and each part's config."""

    role: Role = attrs.field(default=Role.ACTOR_ROLLOUT, converter=_role)
    actor: TrainingWorkerConfig | None = None
    rollout: RolloutWorkerConfig | None = None
    ref: TrainingWorkerConfig | None = None

    def __attrs_post_init__(self) -> None:
        missing = sorted(part for part in self.role.parts if getattr(self, part) is None)
        if missing:
            raise ConfigError(f"role {self.role.value!r} needs a config for {', '.join(missing)}", have=self)


class ActorRolloutRefWorker(GeneratingWorker):
    """Policy, reference and rollout on one rank, with meshes "actor", "ref" and "rollout" of their own.

    `weight_version` counts the policy's updates. A rollout keeps the version of the weights that it was handed.
    """

    def __init__(self, config: ActorRolloutRefConfig | Mapping[str, Any]) -> None:
        self.config = structure(ActorRolloutRefConfig, config, "worker")
        self.actor: TrainingWorker | None = None
        self.ref: TrainingWorker | None = None
        self.weight_version = 0

    @register()
    def init_model(self) -> None:
        """Build what the role has: ref, actor, rollout, in this order."""
        config, parts = self.config, self.config.role.parts
        if self.meshes:
            raise Refused("the worker already has its models", have=sorted(self.meshes), mend="call init_model once")
        self.init_process_group()  # before any rollout's library opens a world of its own
        if "ref" in parts and config.ref is not None:
            self.ref = TrainingWorker(attrs.evolve(config.ref, engine={**config.ref.engine, "trainable": False}))
            self.export_mesh("ref", self.ref, "train")
            self.ref.reset()
        if "actor" in parts and config.actor is not None:
            self.actor = TrainingWorker(config.actor)
            self.export_mesh("actor", self.actor, "train")
            self.actor.reset()
            self.weight_source = WeightSource(
                self.actor.engine, lambda: self.weight_version, config.actor.device, self.context
            )
        if "rollout" in parts and config.rollout is not None:
            self.build_rollout(config.rollout)

    def configs(self) -> Mapping[str, tuple[Kind, str, Any, str | None]]:
        engines = {"actor": self.actor, "ref": self.ref}
        built = {name: engine.config for name, engine in engines.items() if engine is not None}
        return {
            **{name: ("engine", each.backend, each.engine, each.device) for name, each in built.items()},
            **super().configs(),
        }

    @register()
    def set_loss_fn(self, loss: LossSpec | LossFn) -> None:
        """The policy's loss, from now on."""
        self._actor().set_loss_fn(loss)

    @register(on_mesh("actor"), deal_by="tokens", columns=TOKENS, reads_only=True)
    def compute_log_prob(self, batch: TensorDict, temperature: float) -> TensorDict | None:
        """The policy's `old_log_probs` and `entropy` of softmax(logits / temperature), token-aligned.

        Raises:
            Refused: the rows were sampled at another temperature.
        """
        answer = self._actor().infer_batch(batch, ("log_probs", "entropy"), temperature=temperature)
        return _renamed(answer, log_probs="old_log_probs")

    @register(on_mesh("ref"), deal_by="tokens", columns=TOKENS, reads_only=True)
    def compute_ref_log_prob(self, batch: TensorDict, temperature: float) -> TensorDict | None:
        """The reference's `ref_log_probs` of softmax(logits / temperature), token-aligned.

        Raises:
            Refused: the rows were sampled at another temperature.
        """
        if self.ref is None:
            raise self._lacks("ref")
        answer = self.ref.infer_batch(batch, ("log_probs",), temperature=temperature)
        return _renamed(answer, log_probs="ref_log_probs")

    @register(on_mesh("actor"), num_blocks="num_mini_batches", deal_by="tokens", reads_only=True)
    def update_actor(
        self, batch: TensorDict, num_mini_batches: int = 1, epochs: int = 1, *, temperature: float
    ) -> dict[str, Metric]:
        """Train the policy; see TrainingWorker.train_mini_batch. The weight version goes up by one."""
        metrics = self._actor().train_mini_batch(batch, num_mini_batches, epochs, temperature)
        self.weight_version += 1
        return metrics

    @register(Dispatch.SAME_ON_ALL)
    def update_weights(self) -> int:
        """Hand the policy's weights to the rollout in the same process; gives their version. A driver calls
        WeightSync.sync, which does this.

        Order of memory: the rollout's weights come back, the transfer, the trainer's copy goes if it is offloaded, the
        KV cache comes back. When the transfer fails midway the rollout has no valid weights until the next update.
        """
        actor, rollout = self._actor(), self.need_rollout()
        bucket_bytes = (self.config.rollout.bucket_mb if self.config.rollout else 256) << 20
        resume_memory(rollout, ["weights"])
        with actor.engine.eval_mode():
            specs = actor.engine.weight_specs()
            rollout.begin_weight_update(specs, self.weight_version)
            try:
                for load in whole_tensors(specs, actor.engine.export_weights(), bucket_bytes):
                    rollout.load_bucket(load)
                rollout.finish_weight_update()
            except BaseException:
                rollout.abort_weight_update()
                raise
        resume_memory(rollout, ["kv_cache"])
        return self.weight_version

    @register()
    def save_checkpoint(self, path: str, step: int = 0) -> None:
        """Write the policy's checkpoint. Refused on all ranks when one cannot write."""
        self._actor().save_checkpoint(path, step)

    @register(Dispatch.SAME_ON_ALL)
    def load_checkpoint(self, path: str) -> int:
        """Read the policy's checkpoint; gives its step. The rollout has its old weights until update_weights.

        The weight version becomes the step, or goes up by one where that would go back: a version is never two
        different sets of weights.
        """
        step = self._actor().load_checkpoint(path)
        self.weight_version = max(step, self.weight_version + 1)
        return step

    @register()
    def settle_checkpoint(self) -> None:
        """Wait until the policy's checkpoints are whole; see TrainingWorker.settle_checkpoint."""
        self._actor().settle_checkpoint()

    @register()
    def export_model(self, path: str) -> None:
        """Write the policy as a Hugging Face directory; see TrainingWorker.export_model."""
        self._actor().export_model(path)

    def shutdown(self) -> None:
        super().shutdown()
        for part in (self.actor, self.ref):
            if part is not None:
                part.shutdown()

    def _actor(self) -> TrainingWorker:
        if self.actor is None:
            raise self._lacks("actor")
        return self.actor

    def need_rollout(self) -> Rollout:
        if self.rollout is None:
            raise self._lacks("rollout")
        return self.rollout

    def _lacks(self, part: str) -> Refused:
        role = self.config.role
        mend = "call init_model first" if part in role.parts else f"choose a role that has {part}"
        return Refused(f"a worker in role {role.value!r} has no {part}", have=sorted(role.parts), mend=mend)


def _renamed(answer: tuple[TensorDict | None, Any] | None, **names: str) -> TensorDict | None:
    if answer is None or answer[0] is None:
        return None
    for old, new in names.items():
        answer[0].rename_key_(old, new)
    return answer[0]
