"""Worlds of one and two ranks, and tiny models on disk, each made once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core.device import join_world
from sdk.testing import Worlds, tiny_model

sys.path.insert(0, str(Path(__file__).parent))  # for fsdp_steps, here and in the ranks that RankPool spawns


@pytest.fixture(scope="session")
def on() -> Iterator[Worlds]:
    torch.set_num_threads(1)
    join_world(0, 1, dist.HashStore(), timeout_s=60)
    with closing(Worlds(alone_here=True)) as worlds:
        yield worlds
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """`model_dir(family, **options)`: a directory, the same for the same arguments. Weights are large enough that the
    model's predictions are far from uniform."""
    paths: dict[str, str] = {}

    def make(family: str = "qwen3", **options: Any) -> str:
        key = repr((family, sorted(options.items())))
        if key not in paths:
            paths[key] = tiny_model(tmp_path_factory.mktemp(family), family, **({"initializer_range": 0.2} | options))
        return paths[key]

    return make


@pytest.fixture(scope="session")
def qwen3(model_dir: Callable[..., str]) -> str:
    return model_dir("qwen3", tie_word_embeddings=True)
