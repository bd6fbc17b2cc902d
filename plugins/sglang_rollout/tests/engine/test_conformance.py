"""The contract's suites on both rollouts."""

from __future__ import annotations

from typing import ClassVar

import pytest

from sdk.conformance import ColocatedConformance, ReplicaConformance, RolloutConformance

pytestmark = pytest.mark.timeout(900)  # processes that load SGLang start slowly on a busy machine


class TestSglang(RolloutConformance):
    backend = "sglang"
    expected_failures: ClassVar = {
        "test_process_wide_state_is_left_as_it_was": "SGLang sets SGLANG_RUN_ID, filters of warnings, log levels and"
        " handlers of the process that holds its engine, for good"
    }
    config: ClassVar = {"max_num_seqs": 64, "kv_cache_tokens": 8192}
    worlds = (2,)
    families = ("untied", "tied")


class TestSglangServer(RolloutConformance):
    backend = "sglang_server"
    config: ClassVar = {"max_num_seqs": 64, "kv_cache_tokens": 8192}
    worlds = (2,)
    families = ("untied",)


class TestSglangColocated(ColocatedConformance):
    """The policy sharded over two ranks (dp 2), an SGLang engine on each."""

    backend = "sglang"
    config: ClassVar = {"max_model_len": 128, "max_num_seqs": 16, "kv_cache_tokens": 2048}
    worlds = (2,)


class TestSglangReplicas(ReplicaConformance):
    backend = "sglang_server"
    config: ClassVar = {"max_num_seqs": 16, "kv_cache_tokens": 8192}
    num_processes = 3  # the server, its scheduler, its detokenizer
