"""Faults that are put into a sound rollout, each of which the suite must find. They know the protocol, not the rollout.

A fault overrides methods of the rollout's class, so that what it doesn't touch is as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from safetensors.torch import load_file
from tensordict import TensorDict

from core.batch import with_metadata
from core.registry import Entry
from core.rollout import LogProbKind, SamplingParams
from sdk.conformance.base import Mutant
from sdk.conformance.suites.rollout_base import Bucket as Bucket
from sdk.conformance.suites.rollout_base import Weights

MUTANTS: list[Mutant] = []

FaultClass = TypeVar("FaultClass", bound=type["Fault"])


class Fault:
    """Base of the faults, put before the rollout's class; `super()` is the rollout."""

    _config: Any

    @classmethod
    def put_into(cls, rollout: Any) -> Any:
        rollout.__class__ = type(cls.__name__, (cls, type(rollout)), {})
        return rollout

    @staticmethod
    def entry(entry: Entry) -> Entry:
        """See Mutant."""
        return entry

    def own_weights(self) -> Weights:
        return dict(load_file(Path(self._config.model, "model.safetensors")))

    if TYPE_CHECKING:  # what the rollout has
        weight_version: Any

        def __getattr__(self, name: str) -> Any: ...


def caught_by(*tests: str) -> Callable[[FaultClass], FaultClass]:
    """Name the tests that must find a fault; its docstring says what it does wrong."""

    def register(cls: FaultClass) -> FaultClass:
        doc = " ".join((cls.__doc__ or "").split()).rstrip(".")
        MUTANTS.append(Mutant(doc, tests, built=f"{cls.__module__}:{cls.__name__}.put_into", entry=cls.entry))
        return cls

    return register


class GenerateFault(Fault):
    """Changes what is asked of generate, or what comes of it."""

    def asked(self, sampling: SamplingParams) -> SamplingParams:
        return sampling

    def given(self, out: TensorDict, sampling: SamplingParams) -> TensorDict:
        return out

    def generate(self, batch: TensorDict, sampling: SamplingParams, *, min_version: int | None = None) -> TensorDict:
        out: TensorDict = super().generate(batch, self.asked(sampling), min_version=min_version)  # type: ignore[misc]
        with_metadata(out, temperature=sampling.temperature or 1.0, log_prob_kind=LogProbKind(sampling.log_probs).value)
        return self.given(out, sampling) if len(out) else out
