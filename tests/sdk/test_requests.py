"""What rollouts around other projects' engines refuse of a request before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from core.batch import jagged
from core.errors import Refused
from core.rollout import LogProbKind, SamplingParams
from manymesh.parts.requests import RequestCheck, is_certain
from manymesh.parts.rollout_checks import check_sleep_mode
from manymesh.parts.rollout_rows import read_prompts


def prompts(*rows: list[int]) -> TensorDict:
    batch = TensorDict({}, batch_size=[len(rows)])
    return read_prompts(batch.set("prompt_ids", jagged([torch.tensor(row) for row in rows])))


@pytest.fixture
def check(tmp_path: Path) -> RequestCheck:
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    return RequestCheck.of(str(tmp_path))


def test_stops_are_the_models_and_the_requests(check: RequestCheck) -> None:
    assert check.stop_ids(prompts([5, 6]), SamplingParams(stop_token_ids=(9,)), 64, 512) == [2, 9]
    assert check.stop_ids(prompts([5, 6]), SamplingParams(ignore_eos=True), 64, 512) == []


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        ([[5], [64]], {}, "prompt 1 has a token"),
        ([[5], [6] * 500], {"max_new_tokens": 13}, "prompt 1 leaves no room"),
        ([[5]], {"stop_token_ids": (64,)}, r"stop_token_ids[\s\S]*\[64\]"),
        ([[5]], {"stop": ("",)}, "a stop string is empty"),
        ([[5]], {"stop": ("end",)}, "stop strings need a tokenizer"),
    ],
)
def test_what_cannot_be_sampled_is_refused(
    check: RequestCheck, rows: list[list[int]], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(Refused, match=words):
        check.stop_ids(prompts(*rows), SamplingParams(**options), 64, 512)


@pytest.mark.parametrize("kind", LogProbKind)
def test_only_processed_log_probs_of_greedy_tokens_are_certain(kind: LogProbKind) -> None:
    assert is_certain(SamplingParams(temperature=0.0, log_probs=kind)) == (kind is LogProbKind.PROCESSED)
    assert not is_certain(SamplingParams(temperature=0.5, log_probs=kind))


@pytest.mark.parametrize(
    ("device", "sleep_mode", "can"), [("cpu", True, False), ("cuda", False, False), ("cuda", True, True)]
)
def test_only_an_engine_on_cuda_with_sleep_mode_may_release(device: str, sleep_mode: bool, can: bool) -> None:
    if can:
        check_sleep_mode("an engine", device, sleep_mode=sleep_mode)
    else:
        with pytest.raises(Refused, match="an engine frees nothing on CPU"):
            check_sleep_mode("an engine", device, sleep_mode=sleep_mode)
