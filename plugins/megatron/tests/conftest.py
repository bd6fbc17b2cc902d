"""Worlds of one to eight ranks, each made once, and tiny models on disk."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sdk.testing import RankPool, preload, tiny_model

sys.path.insert(0, str(Path(__file__).parent))  # for megatron_steps, here and in the ranks
preload("manymesh_megatron.engine")

On = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def on() -> Iterator[On]:
    """`on(world_size, function, *args)`: the results of function(rank, world_size, *args) by rank."""
    pools: dict[int, RankPool] = {}

    def run(world_size: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        try:
            return pools[world_size].run(function, *args, **options)
        except RuntimeError:
            pools.pop(world_size).close()  # its ranks are ended; the next test gets new ones
            raise

    yield run
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """`model_dir(family, **options)`: a directory, the same for the same arguments. Weights are large enough that the
    model's predictions are far from uniform."""
    made: dict[str, str] = {}

    def make(family: str = "qwen3", **options: Any) -> str:
        key = repr((family, sorted(options.items())))
        if key not in made:
            options = {"initializer_range": 0.1, "num_layers": 4, "tie_word_embeddings": False} | options
            made[key] = tiny_model(tmp_path_factory.mktemp(family), family, **options)
        return made[key]

    return make
