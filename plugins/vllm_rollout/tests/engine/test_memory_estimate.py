"""The estimate of a rank's KV cache against what vLLM has taken. On CPU its weights are in its kernels' own forms."""

from __future__ import annotations

import pytest

from core.manifest import ModelFacts
from core.memory import Load, Phase
from manymesh.parts.decoder_shape import DecoderShape
from manymesh_vllm.local_rollout import VllmRollout
from manymesh_vllm.memory_estimate import memory
from sdk.conformance.suites.rollout_base import Models


def test_the_kv_cache_is_as_estimated(live: VllmRollout, models: Models) -> None:
    facts = ModelFacts.read(models.directory(1))
    load = Load(device="cpu", prompt_tokens=64, row_tokens=256)
    idle = next(each for each in memory(live._config, 1, facts, load) if each.phase is Phase.IDLE)
    assert live._engine is not None
    runner = live._engine.worker.model_runner
    caches = {each.data_ptr(): each.numel() * each.element_size() for each in runner.kv_caches}
    assert idle.kv_cache == pytest.approx(sum(caches.values()), rel=0.02)
    tokens = runner.cache_config.num_gpu_blocks * runner.cache_config.block_size
    assert tokens * DecoderShape.of(facts).kv_cache(4) == sum(caches.values())
