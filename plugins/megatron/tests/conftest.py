"""Worlds of one to eight ranks, each made once, and tiny models on disk."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sdk.testing import Worlds, preload, tiny_model

sys.path.insert(0, str(Path(__file__).parent))  # for megatron_steps, here and in the ranks
preload("manymesh_megatron.engine")


@pytest.fixture(scope="session")
def on() -> Iterator[Worlds]:
    with closing(Worlds()) as worlds:
        yield worlds


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """`model_dir(family, **options)`: a directory, the same for the same arguments. Weights are large enough that the
    model's predictions are far from uniform."""
    paths: dict[str, str] = {}

    def make(family: str = "qwen3", **options: Any) -> str:
        key = repr((family, sorted(options.items())))
        if key not in paths:
            options = {"initializer_range": 0.1, "num_layers": 4, "tie_word_embeddings": False} | options
            paths[key] = tiny_model(tmp_path_factory.mktemp(family), family, **options)
        return paths[key]

    return make
