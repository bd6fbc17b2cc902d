"""The kit's worlds of ranks, and of its tiny models those of four layers that can be cut into stages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from sdk.conformance.base import Session
from sdk.testing import Worlds, preload

sys.path.insert(0, str(Path(__file__).parent))  # for megatron_steps, here and in the ranks
preload("manymesh_megatron.engine")


@pytest.fixture(scope="session")
def on(conformance_session: Session) -> Worlds:
    return conformance_session.worlds


@pytest.fixture(scope="session")
def model_dir(conformance_session: Session) -> Callable[..., str]:
    return partial(conformance_session.model, num_layers=4, tie_word_embeddings=False)
