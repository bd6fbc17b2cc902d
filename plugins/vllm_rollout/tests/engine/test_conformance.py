"""The contract's suite on both rollouts."""

from __future__ import annotations

from typing import ClassVar

import pytest

from sdk.conformance import RolloutConformance

pytestmark = pytest.mark.timeout(600)  # processes that load vLLM start slowly on a busy machine


class TestVllm(RolloutConformance):
    backend = "vllm"
    expected_failures: ClassVar = {
        "test_process_wide_state_is_left_as_it_was": "vLLM sets environment variables of its own for good, its warnings"
        " filters too: VLLM_DIST_IDENT, LD_LIBRARY_PATH"
    }
    config: ClassVar = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "kv_cache_mb": 64}
    worlds = (2,)
    families = ("untied", "tied", "odd vocabulary", "biases", "llama", "experts")


class TestVllmServer(RolloutConformance):
    backend = "vllm_server"
    config: ClassVar = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "kv_cache_mb": 64}
    worlds = (2,)
    families = ("untied",)
