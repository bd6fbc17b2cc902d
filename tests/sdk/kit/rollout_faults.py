"""Bases of the faults of rollouts. They know the protocol, not the rollout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file
from tensordict import TensorDict

from core.batch import with_metadata
from core.rollout import LogProbKind, SamplingParams
from sdk.conformance.suites.rollout_base import Weights
from tests.sdk.kit.faults import Fault


class RolloutFault(Fault):
    """Base of a rollout's faults."""

    _config: Any
    if TYPE_CHECKING:  # what the rollout has
        weight_version: Any

    def own_weights(self) -> Weights:
        return dict(load_file(Path(self._config.model, "model.safetensors")))


class GenerateFault(RolloutFault):
    """Changes what is asked of generate, or what comes of it."""

    def change_request(self, sampling: SamplingParams) -> SamplingParams:
        return sampling

    def change_answer(self, out: TensorDict, sampling: SamplingParams) -> TensorDict:
        return out

    def generate(self, batch: TensorDict, sampling: SamplingParams, *, min_version: int | None = None) -> TensorDict:
        out: TensorDict = super().generate(batch, self.change_request(sampling), min_version=min_version)  # type: ignore[misc]
        kind = LogProbKind(sampling.log_probs).value
        with_metadata(out, rollout_temperature=sampling.temperature or 1.0, log_prob_kind=kind)
        return self.change_answer(out, sampling) if len(out) else out
