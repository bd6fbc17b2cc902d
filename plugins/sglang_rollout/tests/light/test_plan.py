"""What is known of the rollouts without SGLang: manifest, planner, options."""

from __future__ import annotations

import subprocess
import sys

import pytest

from core.config import structure
from core.errors import ConfigError, Refused
from core.manifest import Capability, ModelFacts
from core.registry import EngineRegistry, Status
from manymesh_sglang.config import SglangRolloutConfig, SglangServerConfig
from manymesh_sglang.manifest import manymesh_manifests
from manymesh_sglang.plan import plan, server_plan


def test_listing_and_planning_import_nothing_heavy() -> None:
    code = (
        "import sys, manymesh_sglang.manifest as m, manymesh_sglang.plan as p, manymesh_sglang.config as c;"
        "m.manymesh_manifests(); p.server_plan(c.SglangServerConfig('x'), 2, None);"
        "import manymesh_sglang.scheduler as s; s.register();"
        "print(sorted({'torch', 'transformers', 'ray', 'numpy', 'tensordict', 'sglang'} & set(sys.modules)))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["sglang", "sglang_server"])
def test_they_are_listed_with_what_they_lack_where_there_is_no_sglang(name: str) -> None:
    [entry] = [each for each in EngineRegistry.discover({}).entries if each.name == name]
    if entry.status is not Status.OK:
        assert (entry.status, entry.mend) == (Status.MISSING_DEPENDENCY, "pip install 'sglang>=0.5.23'")
    manifest = next(each for each in manymesh_manifests() if each.name == name)
    assert (Capability.SERVER in manifest.capabilities) == (name == "sglang_server")
    assert Capability.RELEASE not in manifest.capabilities


def facts(heads: int, kv_heads: int) -> ModelFacts:
    return ModelFacts("x", "llama", {"num_attention_heads": heads, "num_key_value_heads": kv_heads})


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_each_rank_has_an_engine_with_as_many_gpus_as_processes_hold_its_model(tp: int) -> None:
    layout_plan = plan(SglangRolloutConfig("x", tensor_parallel=tp), 3, facts(4, 2))
    layout_plan.route.check("rollout")
    assert layout_plan.route.collectors == (0, 1, 2)
    assert layout_plan.gpus_per_process == tp
    assert server_plan(SglangServerConfig("x", tensor_parallel=tp), 3, facts(4, 2)) == layout_plan


def test_heads_that_cannot_be_dealt_and_worlds_without_ranks_are_refused() -> None:
    with pytest.raises(Refused, match=r"tensor_parallel 3 doesn't divide[\s\S]*4 heads, 2 KV heads[\s\S]*1, 2, 4"):
        plan(SglangRolloutConfig("x", tensor_parallel=3), 2, facts(4, 2))
    with pytest.raises(Refused, match="world size 0"):
        plan(SglangRolloutConfig("x"), 0, None)


def test_running_servers_are_one_a_rank() -> None:
    config = SglangServerConfig("x", addresses=("a:1", "b:2"))
    assert server_plan(config, 2, None).route.dp_ranks == (0, 1)
    cut = SglangServerConfig("x", addresses=("a:1", "b:2"), tensor_parallel=4)
    assert server_plan(cut, 2, None).gpus_per_process == 1  # the servers have GPUs of their own
    with pytest.raises(Refused, match=r"2 addresses, 3 ranks[\s\S]*pool of 2"):
        server_plan(config, 3, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel"),
        ({"kv_cache_tokens": 0}, "kv_cache_tokens"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"update_timeout_s": 0}, "update_timeout_s"),
        ({"port": 70000}, "no such port"),
        ({"addresses": ["http://a:1"]}, "host:port"),
        ({"addresses": ["a"]}, "host:port"),
        ({"addresses": ["a:1"], "port": 5}, "port is of a server that is started"),
        ({"addresses": ["a:1"], "weights": "tensor"}, "shared memory"),
        ({"addresses": ["a:1"], "weights": "disk"}, "weights_dir"),
        ({"weights": "pigeon"}, "weights"),
        ({"sglang": {"context_length": 3, "quantization": "fp8"}}, "context_length by the option max_model_len"),
        ({"sglang": {"sampling_backend": "flashinfer"}}, "sampling_backend by the rollout"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        structure(SglangServerConfig, {"model": "x", **options})


def test_further_arguments_of_sglang_pass_and_keys_are_not_shown() -> None:
    config = structure(SglangServerConfig, {"model": "x", "sglang": {"quantization": "fp8"}, "api_key": "secret"})
    assert config.sglang == {"quantization": "fp8"}
    assert "secret" not in repr(config)
