"""The share of a GPU's memory that SGLang is told, and the estimate of a rank's memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core.errors import Refused
from core.manifest import ModelFacts
from core.memory import Load, Memory, Phase
from manymesh_sglang.arguments import arguments, share_of_free
from manymesh_sglang.config import SglangRolloutConfig
from manymesh_sglang.memory import memory

GIB = 2**30
MODEL = ModelFacts(
    "x",
    "llama",
    {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    },
)


def test_half_of_the_gpu_is_half_of_the_gpu_whatever_the_trainer_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang takes its fraction of what is free when it starts."""
    for free in (80, 60, 41):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free * GIB, 80 * GIB))
        config = SglangRolloutConfig("x", gpu_memory_utilization=0.5, dtype="bfloat16")
        options = arguments(config, MODEL, torch.device("cuda", 0), has_tokenizer=True)
        assert options["mem_fraction_static"] * free == pytest.approx(40)


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({"dtype": "float32"}, True),
        ({"dtype": "float32", "sglang": {"attention_backend": "triton"}}, False),
        ({"dtype": "bfloat16"}, False),
    ],
)
def test_float32_on_a_gpu_warns_with_what_to_set(
    options: dict[str, Any], warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * GIB, 80 * GIB))
    arguments(SglangRolloutConfig("x", **options), MODEL, torch.device("cuda", 0), has_tokenizer=True)
    assert ("set dtype to auto or bfloat16" in caplog.text) is warned


def test_a_share_that_is_not_free_is_refused_with_what_is() -> None:
    with pytest.raises(Refused, match=r"30.0 of 80.0 GiB free[\s\S]*40.0 GiB[\s\S]*0.37 or less[\s\S]*offload"):
        share_of_free(0.5, 30 * GIB, 80 * GIB)


def phases(load: Load, **options: Any) -> dict[Phase, Memory]:
    return {each.phase: each for each in memory(SglangRolloutConfig("x", **options), 1, MODEL, load)}


def test_weights_and_kv_cache_are_the_share_and_a_pass_comes_on_top() -> None:
    load = Load(device_bytes=80 * GIB, prompt_tokens=1024, row_tokens=4096, rows=64)
    half = phases(load)
    assert half[Phase.IDLE].total == 40 * GIB
    assert half[Phase.GENERATE].total > half[Phase.IDLE].total
    assert half[Phase.RELEASED].total == 0
    with pytest.raises(Refused, match="KV cache of one row"):
        phases(load, gpu_memory_utilization=0.1)


def test_a_kv_cache_of_so_many_tokens_is_of_that_size() -> None:
    token = 2 * 32 * 8 * 128
    assert phases(Load(), kv_cache_tokens=5000)[Phase.IDLE].kv_cache == 5000 * token * 2
    assert phases(Load(device="cpu"))[Phase.IDLE].kv_cache == 16384 * token * 4
