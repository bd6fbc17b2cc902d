"""What all rollouts do alike, around a backend's engine: their place, versions, weight updates, memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from tensordict import TensorDict

from core.config import RolloutConfig
from core.device import choose_device
from core.engine import WeightSpec
from core.mesh import RankMesh
from core.rollout import MemoryTag, SamplingParams
from manymesh.parts.device_memory import empty_caches
from manymesh.parts.rollout_checks import not_initialized
from manymesh.parts.weight_state import WeightState
from manymesh.parts.weights import Announced

Bucket = Sequence[tuple[str, torch.Tensor]]


class BaseRollout(ABC):
    """`core.rollout.Rollout`, but for the abstract methods below; other hooks do nothing by default.

    Versions: 0 after `initialize()`, the update's version after `finish_weight_update()`, None in between, after an
    update that failed midway and after `release(["weights"])`, until a whole update was loaded. See
    manymesh.parts.weight_state.

    Args:
        config: options; `config.model` is the directory to load.
        device: "cpu", "cuda" or None for what the machine has.
        mesh: this rank's place, valid from the beginning.
    """

    def __init__(self, config: RolloutConfig, device: str | None, mesh: RankMesh) -> None:
        self._mesh = mesh
        self._device = choose_device(device)
        self._config: RolloutConfig = config.on(self._device.type)
        self._weights: WeightState | None = None
        self._expected: Mapping[str, torch.Tensor] = {}
        self._announced: Announced | None = None

    # ---------------------------------------------------------------------------------- what a backend does
    # Hooks that are not abstract do nothing where they are not overridden, which ruff calls B027.

    @abstractmethod
    def generate(self, prompts: TensorDict, sampling: SamplingParams, *, min_version: int | None = None) -> TensorDict:
        """See `core.rollout.Rollout.generate`. Columns come back on the device of prompt_ids.

        With the capability row_seeds, sample j of the prompt with prompt_id i (its row number where there is no such
        column) draws from (sampling.seed, i, j); without a seed, from fresh entropy. With temperature 0,
        log-probabilities RAW and TEMPERATURE are those of the untempered model, PROCESSED are 0, and the metadata
        `rollout_temperature` is 1.
        """

    @abstractmethod
    def _build(self) -> Mapping[str, torch.Tensor]:
        """Build the engine with the directory's weights, or with any where `load` is "none". Returns what
        save_pretrained would write of them, by name.

        Raises:
            Refused: no checkpoint is there, or the engine doesn't take it.
        """

    def _announce(self, specs: Sequence[WeightSpec]) -> Announced:
        """The update that these specs announce. Raises Refused where they are not the model's."""
        return Announced(specs, self._expected)

    def _is_staged(self) -> bool:
        """Whether the old weights are whole until `_end_load`."""
        return False

    def _begin_load(self, specs: Sequence[WeightSpec], version: int) -> None:  # noqa: B027
        """The first bucket of an update is about to come."""

    @abstractmethod
    def _load(self, bucket: Bucket) -> None:
        """Load tensors of the model's names and shapes; they may be reused after return."""

    def _end_load(self, version: int) -> None:  # noqa: B027
        """All tensors have come: put them to use, and drop every cache of other weights."""

    def _abort_load(self) -> None:  # noqa: B027
        """No more tensors of this update come, after `_begin_load`."""

    def _close(self) -> None:  # noqa: B027
        """Let go of the engine, if there is one."""

    # ------------------------------------------------------------------------------------------------- life

    @property
    def mesh(self) -> RankMesh:
        return self._mesh

    @property
    def weight_version(self) -> int | None:
        """None where there are no valid weights."""
        return None if self._weights is None else self._weights.version

    def initialize(self) -> None:
        """Load the directory's weights, which are version 0; with `load: none` there are none before the first update.

        Raises:
            Refused: no checkpoint is there, or the engine doesn't take it.
        """
        empty_caches(self._device)  # engines take a share of what is free, some in processes of their own
        self._expected = self._build()
        self._weights, self._announced = WeightState(0 if self._config.load == "checkpoint" else None), None

    def shutdown(self) -> None:
        """Let go of the engine; `initialize()` may build it again."""
        self._weights = self._announced = None
        self._close()

    def _ready(self) -> WeightState:
        """Raises Refused before initialize() and after shutdown()."""
        if self._weights is None:
            raise not_initialized()
        return self._weights

    # ---------------------------------------------------------------------------------------------- updates

    def begin_weight_update(self, specs: Sequence[WeightSpec], version: int) -> None:
        """See `core.rollout.Rollout`. An update that was begun before and not finished is forgotten.

        Raises:
            Refused: names, shapes or kinds of dtype differ from the model's (dtypes of one kind are cast), or the
                weights are released. Nothing has changed then.
        """
        weights = self._ready()
        announcement = self._announce(specs)
        self._forget_update(weights)
        weights.begin(version, (spec.name for spec in specs))
        self._announced = announcement

    def load_bucket(self, bucket: Bucket) -> None:
        """Load full tensors; they may be reused after return.

        Raises:
            Refused: no update was begun; a tensor was not announced, came before or has another shape. Nothing of the
                bucket is loaded then.
            ManymeshError: the engine did not take them.
        """
        weights, update = self._ready(), self._ready().update()
        assert self._announced is not None
        self._announced.check(bucket, update.missing)
        if not bucket:
            return
        if weights.loading(in_place=not self._is_staged()):
            self._begin_load(self._announced.specs, update.to)
        self._load(bucket)
        weights.loaded(name for name, _ in bucket)

    def finish_weight_update(self) -> None:
        """The new weights are sampled with from here.

        Raises:
            Refused: weights have not come, named; the update is still under way then.
        """
        weights = self._ready()
        version = weights.check_complete()
        weights.loading(in_place=True)
        self._end_load(version)
        weights.finish()
        empty_caches(self._device)  # of the buckets, which engines in other processes had as shared memory

    def abort_weight_update(self) -> None:
        """Forget the update. The old version comes back where its weights are whole: nothing was loaded yet, or the
        engine keeps what was loaded apart. Else there are no valid weights."""
        if self._weights is not None:
            self._forget_update(self._weights)

    def _forget_update(self, weights: WeightState) -> None:
        self._announced = None
        if weights.abort():
            self._abort_load()


class BaseReleasingRollout(BaseRollout):
    """A BaseRollout that gives memory back: `core.rollout.ReleasingRollout`. See weight_state for the order."""

    def _check_can_release(self) -> None:
        """Raises Refused where release would free nothing, as engines do on some devices."""

    @abstractmethod
    def _release_memory(self, tags: Sequence[MemoryTag], released_tags: frozenset[MemoryTag]) -> None:
        """Free the memory of these tags.

        Args:
            tags: one or two that have memory, in the order to free it.
            released_tags: those that have none already.
        """

    @abstractmethod
    def _resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Take the memory of these released tags again, in this order."""

    def release(self, tags: Sequence[MemoryTag]) -> None:
        """Free memory. Weights are dropped, not moved: weight_version is None until they are resumed and a whole update
        was loaded.

        Raises:
            Refused: an unknown tag, or nothing can be freed on this device.
        """
        weights = self._ready()
        tags_to_free, released_tags = weights.to_release(tags), weights.released
        self._check_can_release()
        if "weights" in tags_to_free:
            self._forget_update(weights)  # first: engines put layers in order, in memory that they still have
        weights.release(tags_to_free)
        if tags_to_free:
            self._release_memory(tags_to_free, released_tags)

    def resume(self, tags: Sequence[MemoryTag]) -> None:
        """Take memory again; what is not released stays as it is. Weights hold garbage then, until a whole update.

        Raises:
            Refused: an unknown tag.
        """
        weights = self._ready()
        if tags_to_take := weights.to_resume(tags):
            empty_caches(self._device)  # a trainer's of this process: the engine may be another one
            self._resume_memory(tags_to_take)
            weights.resume(tags_to_take)
