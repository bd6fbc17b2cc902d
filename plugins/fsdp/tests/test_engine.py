"""What is this engine's own around a step: its plan, what it refuses, its collectives; the rest is in the kit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_steps import build, step
from torch.utils._python_dispatch import TorchDispatchMode

from core.config import structure
from core.errors import ConfigError, Refused
from core.manifest import ModelFacts
from manymesh_fsdp.config import FsdpConfig
from manymesh_fsdp.engine import FsdpEngine
from manymesh_fsdp.plan import plan
from sdk.reference import BOTH, make_batch, scale_of


def test_every_rank_has_rows_of_its_own_and_is_collected() -> None:
    layout_plan = plan(FsdpConfig("x"), 4)
    assert layout_plan.route.dp_ranks == (0, 1, 2, 3)
    assert layout_plan.route.collected == {0, 1, 2, 3}
    assert str(layout_plan.layout) == "[fsdp=4]"
    layout_plan.route.check("train")


@pytest.mark.parametrize(
    ("options", "packed"),
    [
        ({}, False),
        ({"attn_implementation": "sdpa"}, False),
        ({"packing": True}, True),
        ({"attn_implementation": "flash_attention_2", "compute_dtype": "bfloat16"}, True),
        ({"attn_implementation": "flash_attention_2", "compute_dtype": "bfloat16", "packing": False}, False),
    ],
)
def test_rows_are_packed_where_asked_or_where_flash_attention_makes_it_cheap(options, packed) -> None:
    assert plan(FsdpConfig("x", **options), 1).limits.packed is packed


def test_illegal_plans_are_refused() -> None:
    with pytest.raises(Refused, match="at least one rank"):
        plan(FsdpConfig("x"), 0)
    with pytest.raises(Refused, match="float32"):
        plan(FsdpConfig("x", dtype="float32", attn_implementation="flash_attention_2"), 1)
    hybrid = ModelFacts("x", "hybrid", {"layer_types": ["full_attention", "linear_attention"]})
    with pytest.raises(Refused, match="leak"):
        plan(FsdpConfig("x", packing=True), 1, hybrid)
    assert not plan(FsdpConfig("x"), 1, hybrid).limits.packed


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_training_of_16_bit_parameters_is_refused_with_the_options_that_learn(dtype) -> None:
    with pytest.raises(Refused) as refused:
        plan(FsdpConfig("x", dtype=dtype), 1)
    assert refused.value.mend == f"set dtype='float32', compute_dtype='{dtype}'"
    plan(FsdpConfig("x", dtype=dtype, trainable=False), 1)


def test_a_small_learning_rate_moves_no_16_bit_parameter() -> None:
    """Why the planner refuses."""
    for dtype, moved in ((torch.bfloat16, 0), (torch.float32, 1000)):
        start = torch.linspace(0.005, 0.045, 1000).to(dtype)
        parameter = torch.nn.Parameter(start.clone())
        optimizer = torch.optim.AdamW([parameter], lr=1e-6, weight_decay=0.0)
        for _ in range(20):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        assert int((parameter.detach() != start).sum()) == moved


@pytest.mark.parametrize(
    ("options", "device", "want"),
    [
        ({}, "cpu", ("float32", None)),
        ({}, "cuda", ("float32", "bfloat16")),
        ({"trainable": False}, "cuda", ("bfloat16", "bfloat16")),
        ({"compute_dtype": "float32"}, "cuda", ("float32", "float32")),
        ({"dtype": "float32"}, "cuda", ("float32", None)),
        ({"compute_dtype": "bfloat16"}, "cpu", ("float32", "bfloat16")),
    ],
)
def test_auto_trains_fp32_parameters_and_on_gpus_computes_in_bf16(options, device, want) -> None:
    there = FsdpConfig("x", **options).on(device)
    assert (there.dtype, there.compute_dtype) == want
    plan(there, 2)


def test_flash_attention_goes_with_auto_on_gpus_alone() -> None:
    config = FsdpConfig("x", attn_implementation="flash_attention_2")
    plan(config, 1)  # the driver doesn't know the device
    plan(config.on("cuda"), 1)
    with pytest.raises(Refused, match="float32"):
        plan(config.on("cpu"), 1)


def test_a_config_is_structured_and_its_errors_name_the_key() -> None:
    config = structure(FsdpConfig, {"model": "x", "packing": True, "optimizer": {"lr": 1}})
    assert (config.packed, config.optimizer.lr) == (True, 1.0)
    assert structure(FsdpConfig, {"model": "x", "packing": None}).packing is None
    with pytest.raises(ConfigError, match="compute_dtype"):
        structure(FsdpConfig, {"model": "x", "compute_dtyp": "bfloat16"})


def spoiled(qwen3: str, directory: Path, how: str) -> str:
    shutil.copytree(qwen3, directory / how)
    if how == "no config":
        (directory / how / "config.json").unlink()
    else:
        changes: dict[str, dict[str, Any]] = {
            "a layer short": {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3},
            "contradictory": {"num_hidden_layers": 3},
            "unknown": {"model_type": "qwen99"},
            "no causal LM": {"model_type": "clip_vision_model"},
        }
        config = directory / how / "config.json"
        if how in changes:
            config.write_text(json.dumps(json.loads(config.read_text()) | changes[how]))
    return str(directory / how)


@pytest.mark.parametrize("how", ["no config", "a layer short", "contradictory", "unknown", "no causal LM"])
def test_a_directory_without_a_whole_model_is_refused_on_all_ranks(on, qwen3, tmp_path, how) -> None:
    at = spoiled(qwen3, tmp_path, how)

    def job(rank: int, world_size: int) -> str:
        engine = FsdpEngine(FsdpConfig(at), device="cpu")
        with pytest.raises(Refused) as refusal:
            engine.initialize()
        return str(refusal.value)

    first, second = on(2, job)
    assert first == second
    assert at in first


def test_an_attention_that_is_not_there_is_refused(on, qwen3) -> None:
    with pytest.raises(Refused, match="attn_implementation"):
        build(qwen3, attn_implementation="no_such_attention")


def test_gradients_cross_ranks_once_a_step_however_many_micro_batches(on, qwen3) -> None:
    class Collectives(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(op))
            return op(*args, **(kwargs or {}))

    def job(rank: int, world_size: int) -> list[int]:
        engine, counts = build(qwen3), []
        for num_micro in (1, 4):
            with Collectives() as collectives:
                step(engine, make_batch(), num_micro)
            counts.append(sum("reduce_scatter" in name for name in collectives.names))
        return counts

    assert on(2, job)[0] == [3, 3]  # two layers and the root


def test_what_was_sent_to_cpu_is_not_computed_with_but_saved_and_loaded(on, qwen3, tmp_path) -> None:
    def job(rank: int, world_size: int) -> None:
        batch, engine, resident = make_batch(), build(qwen3), build(qwen3)
        engine.to("cpu", model=True, optimizer=True, grad=True)
        with pytest.raises(Refused, match="on CPU"):
            engine.forward_backward([batch], None, scale_of(batch), forward_only=True, outputs=BOTH)
        engine.save_checkpoint(str(tmp_path / "a"), step=1)
        engine.load_checkpoint(str(tmp_path / "a"))
        engine.to("device", model=True, optimizer=True, grad=True)
        assert step(engine, batch, 2) == step(resident, batch, 2)

    on(2, job)


def test_tied_embeddings_stay_one_parameter_through_offloads(on, qwen3) -> None:
    engine = build(qwen3)
    engine.to("cpu", model=True, optimizer=True, grad=True)
    engine.to("device", model=True, optimizer=True, grad=True)
    step(engine, make_batch())
    model = engine._ready().model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_readmes_example_runs(on, qwen3, tmp_path, monkeypatch, capsys) -> None:
    readme = Path(__file__).parent.parent / "README.md"
    code = readme.read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)  # this process has its world already
    exec(code.replace("path/to/model", qwen3), {})
    assert "skipped=False" in capsys.readouterr().out
    assert (tmp_path / "step-1" / "manymesh.json").is_file()
