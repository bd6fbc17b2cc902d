"""Rollouts that hold a whole live transformers model on every rank, whose memory is written in place."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from core.config import RolloutConfig
from core.engine import WeightSpec
from core.mesh import RankMesh
from core.rollout import MemoryTag
from manymesh.parts.base_rollout import BaseReleasingRollout, Bucket
from manymesh.parts.device_memory import empty_caches
from manymesh.parts.live_weights import WeightTable, drop, restore
from manymesh.parts.rollout_checks import eos_ids, load_tokenizer
from manymesh.parts.weights import Announced


class ModelRollout(BaseReleasingRollout):
    """A rollout over a transformers model. A subclass gives `_load_model` and `generate`.

    `release(["weights"])` drops the parameters on any device; buffers (rotary tables) stay. "kv_cache" frees nothing
    by itself, for the cache lives no longer than a call of generate. On CUDA either gives the allocator's free blocks
    back to the device.

    Args: as BaseRollout.
    """

    def __init__(self, config: RolloutConfig, device: str | None, mesh: RankMesh) -> None:
        super().__init__(config, device, mesh)
        self._tokenizer = cache(lambda: load_tokenizer(config.model))
        self._eos: tuple[int, ...] = ()
        self._model: Any = None
        self._table: WeightTable | None = None
        self._dropped: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

    @abstractmethod
    def _load_model(self) -> Any:
        """The directory's model, on any device. Raises Refused where it holds none."""

    def _build(self) -> Mapping[str, torch.Tensor]:
        model = self._load_model()
        self._eos = eos_ids(self._config.model)
        self._model = model.requires_grad_(False).to(self._device)
        self._table, self._dropped = WeightTable(self._model), []
        return {}

    def _announce(self, specs: Sequence[WeightSpec]) -> Announced:
        return self._live().announced(specs)

    def _load(self, bucket: Bucket) -> None:
        self._live().copy(bucket)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _live(self) -> WeightTable:
        self._ready()
        assert self._table is not None
        return self._table

    def _release_memory(self, tags: Sequence[MemoryTag], released_tags: frozenset[MemoryTag]) -> None:
        if "weights" in tags:
            self._dropped = drop(self._model)
        empty_caches(self._device)

    def _resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        if "weights" in tags:
            restore(self._dropped)
            self._dropped = []

    def _close(self) -> None:
        self._model = self._table = None
        self._dropped = []
        empty_caches(self._device)
