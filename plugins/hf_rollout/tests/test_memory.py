"""The memory estimate against what tensors of real calls take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core.manifest import ModelFacts
from core.memory import Load, Phase
from core.rollout import SamplingParams
from manymesh_hf.config import HfRolloutConfig
from manymesh_hf.memory import memory
from manymesh_hf.rollout import HfRollout
from sdk.conformance.suites.rollout_base import prompts
from sdk.peak_memory import peak_memory
from sdk.testing import tiny_model

ROWS, PROMPT, NEW = 8, 96, 8
BOUND = 0.1  # of what is measured


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes: dict[str, Any] = {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 384, "head_dim": 32}
    return tiny_model(tmp_path_factory.mktemp("memory"), num_layers=6, **sizes)


MORE = ({"max_batch_rows": 2}, {"dtype": "bfloat16"})


@pytest.mark.parametrize("options", [{}, *(pytest.param(each, marks=pytest.mark.ci) for each in MORE)], ids=str)
def test_the_estimate_is_near_what_tensors_take(model: str, options: dict[str, Any]) -> None:
    rollout = HfRollout(HfRolloutConfig(model, **options), device="cpu")
    rollout.initialize()
    batch = prompts(*[[3 + row] * PROMPT for row in range(ROWS)])
    sampling = SamplingParams(max_new_tokens=NEW, ignore_eos=True, seed=0)
    have = {
        Phase.IDLE: peak_memory(lambda: torch.zeros(1), rollout._model),
        Phase.GENERATE: peak_memory(lambda: rollout.generate(batch, sampling), rollout._model),
    }
    load = Load(device="cpu", prompt_tokens=PROMPT, row_tokens=PROMPT + NEW, rows=ROWS)
    want = {each.phase: each for each in memory(HfRolloutConfig(model, **options), 1, ModelFacts.read(model), load)}
    for phase, size in have.items():
        assert want[phase].total == pytest.approx(size, rel=BOUND), (phase, want[phase])
    rollout.release(["weights", "kv_cache"])
    assert peak_memory(lambda: torch.zeros(1), rollout._model) < 0.05 * have[Phase.IDLE]
    assert want[Phase.RELEASED].total == 0


def test_on_gpus_weights_are_in_16_bits_and_read_on_the_host(model: str) -> None:
    facts = ModelFacts.read(model)
    cpu, cuda = (
        {each.phase: each for each in memory(HfRolloutConfig(model), 2, facts, Load(device=device))}
        for device in ("cpu", "cuda")
    )
    assert cpu[Phase.IDLE].parameters == 2 * cuda[Phase.IDLE].parameters
    assert (cpu[Phase.LOAD].host, cuda[Phase.LOAD].host) == (0, cuda[Phase.LOAD].parameters)
