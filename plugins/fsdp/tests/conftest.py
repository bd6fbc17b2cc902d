"""The kit's worlds of ranks and tiny models, and a world of one in this process for engines that tests build here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from core.device import join_world
from sdk.conformance.base import Session
from sdk.testing import Worlds

sys.path.insert(0, str(Path(__file__).parent))  # for fsdp_steps, here and in the ranks that RankPool spawns


@pytest.fixture(scope="session")
def on(conformance_session: Session) -> Iterator[Worlds]:
    torch.set_num_threads(1)
    join_world(0, 1, dist.HashStore(), timeout_s=60)
    yield conformance_session.worlds
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def model_dir(conformance_session: Session) -> Callable[..., str]:
    return partial(conformance_session.model, initializer_range=0.2)


@pytest.fixture(scope="session")
def qwen3(model_dir: Callable[..., str]) -> str:
    return model_dir("qwen3", tie_word_embeddings=True)
