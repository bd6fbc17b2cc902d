"""The estimate of a rank's memory, by config.json and options. What vLLM has in truth is in tests/engine."""

from __future__ import annotations

from typing import Any

import pytest

from core.errors import Refused
from core.manifest import ModelFacts
from core.memory import Load, Memory, Phase
from manymesh.parts.decoder_shape import DecoderShape
from manymesh_vllm.config import VllmRolloutConfig
from manymesh_vllm.memory_estimate import memory, rank_weights

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
        "max_position_embeddings": 131072,
    },
)
LOAD = Load(device_bytes=80 * GIB, row_tokens=8192, rows=64)


def phases(load: Load = LOAD, **options: Any) -> dict[Phase, Memory]:
    config = VllmRolloutConfig("x", **({"max_model_len": 8192} | options))
    return {each.phase: each for each in memory(config, 8, MODEL, load)}


def test_weights_one_pass_and_kv_cache_are_the_share_of_the_gpu() -> None:
    half = phases(gpu_memory_utilization=0.5)
    assert half[Phase.GENERATE].total == 40 * GIB
    assert half[Phase.IDLE].parameters == pytest.approx(16e9, rel=0.01)
    assert half[Phase.RELEASED].total == 0
    assert Phase.RELEASED not in phases(sleep_mode=False)
    more = phases(gpu_memory_utilization=0.9)[Phase.GENERATE]
    assert more.kv_cache - half[Phase.GENERATE].kv_cache == pytest.approx(32 * GIB, rel=1e-6)


def test_a_kv_cache_of_a_given_size_is_of_that_size() -> None:
    assert phases(kv_cache_mb=4096)[Phase.GENERATE].kv_cache == 4 * GIB
    assert phases(Load(device="cpu", row_tokens=64))[Phase.GENERATE].kv_cache == GIB // 2
    by_row = phases(Load(row_tokens=1000, rows=3))[Phase.GENERATE].kv_cache
    assert by_row == 3 * 1000 * 2 * 32 * 8 * 128 * 2


def test_ranks_share_weights_and_heads_until_each_has_one() -> None:
    shape = DecoderShape.of(MODEL)
    whole = rank_weights(shape, 1)
    assert whole == shape.num_parameters
    assert rank_weights(shape, 8) == pytest.approx(whole / 8, rel=0.01)
    two_heads = 2 * 128 * 4096 * 32  # keys and values of one head, in each layer
    assert rank_weights(shape, 16) - (rank_weights(shape, 8) / 2) == pytest.approx(two_heads / 2, rel=0.05)


def test_a_whole_context_in_one_pass_is_taken_from_the_kv_cache() -> None:
    """Where prompts are not cut and there is no max_model_len, a pass is as long as the model's context."""
    whole = {"cut_prompts": False}
    short, long = (phases(max_model_len=length, **whole)[Phase.GENERATE] for length in (8192, None))
    assert phases(max_model_len=None)[Phase.GENERATE].activations == short.activations
    assert long.activations == 16 * short.activations
    assert short.kv_cache - long.kv_cache == long.activations - short.activations > 8 * GIB
    with pytest.raises(Refused, match=r"131072 tokens[\s\S]*lower max_model_len"):
        phases(max_model_len=None, gpu_memory_utilization=0.33, **whole)
