"""One engine for all tests that only generate, and tiny models on disk whose heads are as wide as vLLM wants on CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM

from core.batch import jagged
from manymesh_vllm.config import VllmRolloutConfig
from manymesh_vllm.rollout import VllmRollout
from sdk.testing import character_tokenizer, tiny_model

Ready = Callable[..., VllmRollout]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """`checkpoints(family, seed, **options)`: a directory, the same one for the same arguments."""
    made: dict[tuple[Any, ...], str] = {}

    def make(family: str = "qwen3", seed: int = 0, **options: Any) -> str:
        key = (family, seed, *sorted(options.items()))
        if key not in made:
            wide = {"hidden_size": 128} if family == "qwen2" else {"head_dim": 32}
            directory = tmp_path_factory.mktemp(family)
            made[key] = tiny_model(directory, family, seed=seed, **({"initializer_range": 0.3} | wide | options))
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
def make_ready() -> Ready:
    """`make_ready(directory, **options)`: an initialized rollout, to be shut down by whom it was made for."""

    def make(directory: str, **options: Any) -> VllmRollout:
        small = {"max_model_len": 256, "max_num_seqs": 64, "max_num_batched_tokens": 2048, "kv_cache_mb": 64}
        rollout = VllmRollout(VllmRolloutConfig(directory, **(small | options)), device="cpu")
        rollout.initialize()
        return rollout

    return make


@pytest.fixture(scope="module")
def rollout(make_ready: Ready, model_dir: str) -> Iterator[VllmRollout]:
    """One rollout for all tests of a file that only generate. Others live beside it, of models without experts."""
    ready = make_ready(model_dir)
    yield ready
    ready.shutdown()


@pytest.fixture
def ready(make_ready: Ready) -> Iterator[Ready]:
    """`ready(directory, **options)`: a rollout of the test's own."""
    made: list[VllmRollout] = []

    def make(directory: str, **options: Any) -> VllmRollout:
        made.append(make_ready(directory, **options))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


@pytest.fixture(scope="session")
def reference(model_dir: str) -> Any:
    """The same model, loaded by transformers alone."""
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def prompts() -> Callable[..., TensorDict]:
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
