"""The contract's suite on both rollouts."""

from __future__ import annotations

from typing import ClassVar

import pytest

from sdk.conformance import RolloutConformance

pytestmark = pytest.mark.timeout(600)  # processes that load vLLM start slowly on a busy machine


class TestVllm(RolloutConformance):
    backend = "vllm"
    config: ClassVar = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "kv_cache_mb": 64}
    worlds = (2,)
    families = ("untied", "tied", "odd vocabulary", "biases", "llama", "experts")


class TestVllmServer(RolloutConformance):
    backend = "vllm_server"
    config: ClassVar = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "kv_cache_mb": 64}
    worlds = (2,)
    families = ("untied",)
