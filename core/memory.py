"""What a backend would hold of a device's memory, told before anything is built. Light: no torch."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Protocol

import attrs

from core.model_facts import ModelFacts


class Phase(StrEnum):
    """What a backend is doing. An engine has the first five, a rollout LOAD, IDLE, GENERATE and, where it can give its
    memory back, RELEASED."""

    LOAD = "load"  # initialize()
    IDLE = "idle"  # between calls
    EVAL = "eval"  # a forward pass in eval_mode()
    TRAIN = "train"  # a step in train_mode()
    EXPORT = "export"  # export_weights() in eval_mode()
    GENERATE = "generate"
    RELEASED = "released"  # after release() of all tags


@attrs.frozen
class Load:
    """What a backend is asked for, as far as memory depends on it.

    Attributes:
        device: torch device type.
        device_bytes: of memory that one device has; None where that is not known.
        rank: whose memory.
        micro_batch_tokens: of the largest micro-batch, padding included.
        num_micro_batches: of one optimizer step on one rank.
        prompt_tokens, row_tokens: of the longest prompt, and of the longest row with its response.
        rows: that one rank of a rollout is handed at once, samples counted.
    """

    device: str = "cuda"
    device_bytes: int | None = None
    rank: int = 0
    micro_batch_tokens: int = 16384
    num_micro_batches: int = 1
    prompt_tokens: int = 1024
    row_tokens: int = 2048
    rows: int = 1


@attrs.frozen
class Memory:
    """Bytes that one rank holds at the worst moment of a phase, by what they hold.

    Attributes:
        activations: kept for backward, and whatever else lives no longer than a call.
        host: on the CPU beside it; 0 where the device is the CPU.
    """

    phase: Phase
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    kv_cache: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.kv_cache


class MemoryEstimator(Protocol):
    """Pure and light: no torch, no weights, no device. One Memory for each phase that the backend has.

    Raises:
        Refused: the model's config.json doesn't say enough, or what is asked for can never fit.
    """

    def __call__(self, config: Any, world_size: int, model: ModelFacts, load: Load) -> Sequence[Memory]: ...
