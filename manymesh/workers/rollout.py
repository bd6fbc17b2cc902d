"""RolloutWorker: a rollout in a pool of its own, and what it has in common with workers that hold more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from tensordict import TensorDict

from core.batch import num_rows
from core.columns import GENERATED
from core.config import left_to_device, structure
from core.device import choose_device
from core.dispatch import Dispatch, on_mesh, register
from core.errors import BadAnswer, Refused
from core.manifest import Capability, Kind
from core.registry import Choice, EngineRegistry
from core.rollout import MemoryTag, Rollout, SamplingParams, ScoringRollout
from manymesh.parts.rollout_checks import releasing
from manymesh.parts.weight_state import RELEASE_ORDER, RESUME_ORDER
from manymesh.workers.transfer.remote import WeightSink, WeightWorker


@attrs.frozen
class RolloutWorkerConfig:
    """A rollout backend.

    Attributes:
        backend: name in the registry.
        engine: the backend's options, structured into its manifest's class.
        bucket_mb: weights of the same process are handed over in loads of about this size, MiB.
        release_after_generate: give the rollout's memory back after each generate; new weights refill it.
        device: torch device type; None for what the machine has.
        choice: as TrainingWorkerConfig's.
    """

    backend: str = "hf"
    engine: Mapping[str, Any] = attrs.field(factory=dict)
    bucket_mb: int = 256
    release_after_generate: bool = False
    device: str | None = None
    choice: Choice | None = None


class GeneratingWorker(WeightWorker):
    """A worker that holds a rollout, with mesh "rollout"."""

    rollout: Rollout | None = None
    rollout_config: RolloutWorkerConfig | None = None

    def build_rollout(self, config: RolloutWorkerConfig) -> None:
        rollout: Rollout = EngineRegistry.new(
            None, config.backend, config.engine, config.device, kind="rollout", expect=config.choice
        )
        self.rollout, self.rollout_config = rollout, config
        self.add_mesh("rollout", rollout.mesh)
        if config.release_after_generate:
            releasing(rollout)  # refuses before anything heavy is built
        rollout.initialize()
        self.weight_sink = WeightSink(rollout, config.device, self.context)

    def need_rollout(self) -> Rollout:
        """The rollout. Raises Refused where the worker has none."""
        if self.rollout is None:
            raise Refused("the worker has no rollout yet", mend="call init_model first")
        return self.rollout

    def configs(self) -> Mapping[str, tuple[Kind, str, Any, str | None]]:
        """Of each part that the worker has: its backend's kind and name, its options, its device."""
        config = self.rollout_config
        return {"rollout": ("rollout", config.backend, config.engine, config.device)} if config is not None else {}

    @register(Dispatch.RANK_ZERO)
    def settled_options(self) -> dict[str, dict[str, Any]]:
        """By part ("actor", "ref", "rollout") the options that were left to the device, with what they are on it."""
        return {
            part: left_to_device(EngineRegistry.get(name, kind).config(options), choose_device(device).type)
            for part, (kind, name, options, device) in self.configs().items()
        }

    @property
    def newest_version(self) -> int | None:
        """Of the newest weights that the worker knows of: its own policy's, or those of the last sync."""
        if self.weight_source is not None:
            return self.weight_source.version()
        return self.weight_sink.offered_version if self.weight_sink is not None else None

    @register(
        on_mesh("rollout"),
        rows_per_input=lambda prompts, sampling, min_version: sampling.num_samples,
        columns=("prompt_ids", "attention_mask", "prompt_id"),
        reads_only=True,
    )
    def generate_sequences(
        self, prompts: TensorDict, sampling: SamplingParams, min_version: int | None = None
    ) -> TensorDict:
        """Sample responses.

        Args:
            prompts: `prompt_ids` (rows); `prompt_id` is the row's number where absent.
            min_version: refuse to sample with older weights. None: with older ones than the worker knows of, which are
                its own policy's, or those of the last sync.

        Returns:
            rows x sampling.num_samples, prompt-major, columns as in core.columns.
        """
        rollout = self.need_rollout()
        if prompts.get("prompt_id", None) is None:
            rows = self.shard.row_numbers() if self.shard else range(num_rows(prompts))
            prompts["prompt_id"] = torch.tensor(rows, dtype=torch.int64)
        if min_version is None:
            min_version = self.newest_version
        sequences = rollout.generate(prompts, sampling, min_version=min_version)
        missing = sorted(GENERATED - set(sequences.keys()))
        if missing:
            backend = self.rollout_config.backend if self.rollout_config else "?"
            raise BadAnswer(
                f"the rollout {backend!r} answered without columns of the contract: {', '.join(missing)}",
                have=sorted(sequences.keys()),
                mend="see the table of columns in core/columns.py",
            )
        if self.rollout_config is not None and self.rollout_config.release_after_generate:
            releasing(rollout).release(RELEASE_ORDER)
        return sequences

    @register(on_mesh("rollout"), columns=("input_ids", "attention_mask"), reads_only=True)
    def score_sequences(self, sequences: TensorDict, temperature: float = 1.0, top_k: int = 0) -> TensorDict:
        """Log-probabilities of given texts by the rollout's weights; see core.rollout.ScoringRollout.score.

        Raises:
            Refused: the rollout doesn't score.
        """
        rollout = self.need_rollout()
        if not isinstance(rollout, ScoringRollout):
            backend = self.rollout_config.backend if self.rollout_config else "?"
            raise Refused(
                f"the rollout {backend!r} doesn't score",
                mend=f"choose one that offers the capability {Capability.SCORE.value!r}",
            )
        return rollout.score(sequences, temperature=temperature, top_k=top_k)

    @register()
    def release_rollout(self, tags: Sequence[MemoryTag] = RELEASE_ORDER) -> None:
        """Give memory back; without weights it generates again only after new ones have come.

        Raises:
            Refused: the backend doesn't give memory back, on this device.
        """
        releasing(self.need_rollout()).release(tags)

    @register()
    def resume_rollout(self, tags: Sequence[MemoryTag] = RESUME_ORDER) -> None:
        """Take memory again. Raises Refused where the backend doesn't give memory back."""
        releasing(self.need_rollout()).resume(tags)

    @register(Dispatch.SAME_ON_ALL)
    def rollout_version(self) -> int | None:
        """The version of the rollout's weights; None where it has no valid ones."""
        return self.need_rollout().weight_version

    def shutdown(self) -> None:
        super().shutdown()
        if self.rollout is not None:
            self.rollout.shutdown()


class RolloutWorker(GeneratingWorker):
    """A rollout alone on its ranks. Its weights come from another group: see WeightSync."""

    def __init__(self, config: RolloutWorkerConfig | Mapping[str, Any]) -> None:
        self.config = structure(RolloutWorkerConfig, config, "rollout worker")

    @register()
    def init_model(self) -> None:
        """Build the rollout, with the weights of its model directory as version 0."""
        if self.meshes:
            raise Refused("the worker already has its rollout", have=sorted(self.meshes), mend="call init_model once")
        self.init_process_group()  # before the rollout's library opens a world of its own
        self.build_rollout(self.config)
