"""The contract's suites on both rollouts."""

from __future__ import annotations

from typing import ClassVar

import pytest

from sdk.conformance import ColocatedConformance, ReplicaConformance, RolloutConformance

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


class TestVllmColocated(ColocatedConformance):
    """The policy sharded over two ranks (dp 2), one vLLM cut over both (tp 2)."""

    backend = "vllm"
    config: ClassVar = {
        "tensor_parallel": 2,
        "max_model_len": 128,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "kv_cache_mb": 16,
    }
    worlds = (2,)


class TestVllmReplicas(ReplicaConformance):
    backend = "vllm_server"
    config: ClassVar = {"max_num_seqs": 16, "max_num_batched_tokens": 1024, "kv_cache_mb": 32}
    num_processes = 1  # vLLM's engine
