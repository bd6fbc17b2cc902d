"""Tiny models on disk, made once, with weights large enough that what they predict is far from uniform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM

from core.batch import jagged
from manymesh_hf.config import HfRolloutConfig
from manymesh_hf.rollout import HfRollout
from sdk.testing import character_tokenizer, tiny_model

MakePrompts = Callable[..., TensorDict]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """`checkpoints(family, seed, **options)`: a directory, the same one for the same arguments."""
    made: dict[tuple[Any, ...], str] = {}

    def make(family: str = "qwen3", seed: int = 0, **options: Any) -> str:
        key = (family, seed, *sorted(options.items()))
        if key not in made:
            directory = tmp_path_factory.mktemp(family)
            made[key] = tiny_model(directory, family, seed=seed, **({"initializer_range": 0.3} | options))
        return made[key]

    return make


@pytest.fixture(scope="session")
def model_dir(checkpoints: Callable[..., str]) -> str:
    """A qwen3 with a tokenizer of one character a token, and a generation_config that would change sampling."""
    directory = checkpoints()
    character_tokenizer(directory)
    Path(directory, "generation_config.json").write_text(
        '{"eos_token_id": 2, "pad_token_id": 0, "do_sample": true, "top_k": 1, "temperature": 0.1,'
        ' "repetition_penalty": 3.0, "max_new_tokens": 1}'
    )
    return directory


@pytest.fixture(scope="session")
def rollout(model_dir: str) -> HfRollout:
    """One rollout for all tests that only generate."""
    ready = HfRollout(HfRolloutConfig(model_dir), device="cpu")
    ready.initialize()
    return ready


@pytest.fixture(scope="session")
def reference(model_dir: str) -> Any:
    """The same model, loaded by transformers alone."""
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def prompts() -> MakePrompts:
    """`prompts([1, 5], [7], prompt_id=[3, 4])`: a batch of jagged prompts."""

    def make(*rows: Sequence[int], prompt_id: Sequence[int] | None = None) -> TensorDict:
        batch = TensorDict({}, batch_size=[len(rows)])
        batch.set("prompt_ids", jagged([torch.tensor(row) for row in rows]))
        if prompt_id is not None:
            batch.set("prompt_id", torch.tensor(prompt_id))
        return batch

    return make


@pytest.fixture(scope="session")
def responses() -> Callable[[TensorDict], list[list[int]]]:
    """The response's tokens of each row."""

    def of(batch: TensorDict) -> list[list[int]]:
        rows = zip(batch["input_ids"].unbind(), batch["response_mask"].unbind(), strict=True)
        return [ids[mask].tolist() for ids, mask in rows]

    return of
