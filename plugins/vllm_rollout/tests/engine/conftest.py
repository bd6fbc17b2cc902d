"""Models for tests beside the suite's, and engines of a test's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import pytest

from manymesh_vllm.config import VllmRolloutConfig
from manymesh_vllm.local_rollout import VllmRollout
from sdk.conformance.suites.rollout_base import Models

Ready = Callable[..., VllmRollout]


@pytest.fixture(scope="session")
def models(conformance_session: Any) -> Models:
    return Models(conformance_session)


@pytest.fixture(scope="module")
def live(models: Models) -> Iterator[VllmRollout]:
    """One engine for the tests of a file, of model 1 at first. Others live beside it, of models without experts."""
    rollout = made(models.directory(1))
    yield rollout
    rollout.shutdown()


@pytest.fixture
def ready() -> Iterator[Ready]:
    """`ready(directory, **options)`: an initialized rollout of the test's own."""
    rollouts: list[VllmRollout] = []

    def make(directory: str, **options: Any) -> VllmRollout:
        rollouts.append(made(directory, **options))
        return rollouts[-1]

    yield make
    for each in rollouts:
        each.shutdown()


def made(directory: str, **options: Any) -> VllmRollout:
    small = {"max_model_len": 256, "max_num_seqs": 64, "max_num_batched_tokens": 2048, "kv_cache_mb": 64}
    rollout = VllmRollout(VllmRolloutConfig(directory, **(small | options)), device="cpu")
    rollout.initialize()
    return rollout
