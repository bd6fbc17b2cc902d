"""A toy model, tokenizer and data for the recipes' tests, made once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from manymesh.recipes.grpo.data import load_tokenizer
from manymesh.recipes.toy import write_copy_task, write_model


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Directory with `model` (and its tokenizer) and `copy.jsonl`."""
    directory = tmp_path_factory.mktemp("toy")
    write_model(directory / "model", hidden_size=32, num_layers=1)
    write_copy_task(directory / "copy.jsonl", num_rows=50)
    return directory


@pytest.fixture(scope="session")
def tokenizer(toy: Path) -> Any:
    return load_tokenizer(str(toy / "model"))
