"""What an engine is before and around a step: its mesh, its modes, offloading, and what it refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_steps import build, infer, shares, step, weights
from tensordict import TensorDict
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from core.batch import to_jagged, with_metadata
from core.config import structure
from core.errors import ConfigError, Refused
from core.manifest import Capability, ModelFacts
from core.protocols import Engine, LossScale
from manymesh_fsdp.config import FsdpConfig
from manymesh_fsdp.engine import FsdpEngine
from manymesh_fsdp.manifest import manymesh_manifests
from manymesh_fsdp.plan import plan
from sdk.reference import BOTH, PolicyLoss, make_batch, scale_of


def test_listing_and_planning_import_nothing_heavy() -> None:
    code = (
        "import sys, manymesh_fsdp.manifest as m, manymesh_fsdp.plan as p, manymesh_fsdp.config as c;"
        "m.manymesh_manifests(); p.plan(c.FsdpConfig('x'), 2, None);"
        "print(sorted({'torch', 'transformers', 'ray', 'numpy', 'tensordict'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_the_manifest_offers_what_the_engine_has() -> None:
    (manifest,) = manymesh_manifests()
    assert (manifest.kind, manifest.name) == ("engine", "fsdp")
    assert Capability.ADAPTER not in manifest.capabilities


def test_every_rank_has_rows_of_its_own_and_is_collected() -> None:
    planned = plan(FsdpConfig("x"), 4)
    assert planned.route.dp_ranks == (0, 1, 2, 3)
    assert planned.route.collected == {0, 1, 2, 3}
    assert str(planned.layouts["dense"]) == "[fsdp=4]"
    planned.route.check("train")


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
        plan(FsdpConfig("x", attn_implementation="flash_attention_2"), 1)
    hybrid = ModelFacts("x", "hybrid", {"layer_types": ["full_attention", "linear_attention"]})
    with pytest.raises(Refused, match="leak"):
        plan(FsdpConfig("x", packing=True), 1, hybrid)
    assert not plan(FsdpConfig("x"), 1, hybrid).limits.packed


def test_a_config_is_structured_and_its_errors_name_the_key() -> None:
    config = structure(FsdpConfig, {"model": "x", "packing": True, "optimizer": {"lr": 1}})
    assert (config.packed, config.optimizer.lr) == (True, 1.0)
    assert structure(FsdpConfig, {"model": "x", "packing": None}).packing is None
    with pytest.raises(ConfigError, match="compute_dtype"):
        structure(FsdpConfig, {"model": "x", "compute_dtyp": "bfloat16"})


def test_the_mesh_is_there_before_the_model(on) -> None:
    def job(rank: int, world_size: int) -> None:
        engine = FsdpEngine(FsdpConfig("nowhere"), device="cpu")
        assert isinstance(engine, Engine)
        assert (engine.mesh.rank, engine.mesh.dp_rank, engine.mesh.dp_size) == (rank, rank, world_size)
        assert engine.mesh.is_collect
        assert dist.get_process_group_ranks(engine.mesh.group("fsdp")) == list(range(world_size))
        with pytest.raises(Refused, match="axes"):
            engine.mesh.group("tp")
        with pytest.raises(Refused, match="initialize"):
            engine.optimizer_zero_grad()

    for world_size in (1, 2):
        on(world_size, job)


def spoiled(qwen3: str, directory: Path, how: str) -> str:
    if how == "missing":
        return str(directory / "nowhere")
    shutil.copytree(qwen3, directory / how)
    if how == "no weights":
        (directory / how / "model.safetensors").unlink()
    elif how == "no config":
        (directory / how / "config.json").unlink()
    elif how == "cut":
        file = directory / how / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-5000])
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


@pytest.mark.parametrize(
    "how", ["missing", "no weights", "no config", "cut", "a layer short", "contradictory", "unknown", "no causal LM"]
)
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


def test_refusals_of_a_pass_leave_the_engine_as_it_was(on, qwen3) -> None:
    class Values(PolicyLoss):
        needs = frozenset({"values"})

    class Broken(PolicyLoss):
        """Fails in the second micro-batch, when the first has already left a gradient that was not reduced."""

        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, outputs: Any, batch: Any, scale: Any) -> Any:
            self.calls += 1
            if self.calls == 2:
                raise Refused("the batch lacks a column")
            return super().__call__(outputs, batch, scale)

    class Detached(PolicyLoss):
        def __call__(self, outputs: Any, batch: Any, scale: Any) -> Any:
            loss, metrics = super().__call__(outputs, batch, scale)
            return loss.detach(), metrics

    def job(rank: int, world_size: int) -> None:
        batch, engine, untouched = make_batch(), build(qwen3), build(qwen3)
        micro_batches = shares(batch, rank, world_size, 2)
        jagged = [to_jagged(each) for each in micro_batches]
        cold = [with_metadata(each.copy(), temperature=0.0) for each in micro_batches]
        for message, rows, loss, options in [
            ("outputs", micro_batches, Values(), {}),
            ("outputs", micro_batches, None, {"forward_only": True, "outputs": frozenset({"logits"})}),
            ("padded", jagged, PolicyLoss(), {}),
            ("temperature", cold, PolicyLoss(), {}),
            ("needs a loss", micro_batches, None, {}),
            ("lacks a column", micro_batches, Broken(), {}),
            ("no gradient", micro_batches, Detached(), {}),
        ]:
            with engine.train_mode(), pytest.raises(Refused, match=message):
                engine.forward_backward(rows, loss, scale_of(batch), **options)
        with pytest.raises(Refused, match="no gradient"):
            engine.optimizer_step()
        assert step(engine, batch, 2) == step(untouched, batch, 2)
        want = weights(untouched)
        assert all(torch.equal(each, want[name]) for name, each in weights(engine).items())

    for world_size in (1, 2):
        on(world_size, job)


def test_gradients_that_are_not_finite_change_nothing(on, qwen3) -> None:
    """One rank's bad row is enough, and all ranks skip."""

    def job(rank: int, world_size: int) -> None:
        batch, engine = make_batch(), build(qwen3)
        step(engine, batch)
        before = weights(engine)
        state = {name: each.clone() for name, each in engine._tensors().items() if name.startswith("optimizer")}
        bad = batch.clone()
        bad["advantages"][0] = float("inf")
        _, norm, skipped = step(engine, bad)
        assert skipped
        assert not torch.tensor(norm).isfinite()
        assert all(torch.equal(each, before[name]) for name, each in weights(engine).items())
        for name, each in state.items():
            now = engine._tensors()[name]
            same = torch.equal(now.to_local(), each.to_local()) if isinstance(now, DTensor) else torch.equal(now, each)
            assert same
        assert step(engine, batch)[2] is False

    on(2, job)


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
            with Collectives() as seen:
                step(engine, make_batch(), num_micro)
            counts.append(sum("reduce_scatter" in name for name in seen.names))
        return counts

    assert on(2, job)[0] == [3, 3]  # two layers and the root


def test_an_engine_that_is_not_trainable_infers_and_refuses_to_train(on, qwen3) -> None:
    engine, batch = build(qwen3, trainable=False), make_batch()
    assert infer(engine, batch).keys() == BOTH
    for call in (engine.train_mode, engine.optimizer_zero_grad, engine.optimizer_step, engine.lr_scheduler_step):
        with pytest.raises(Refused, match="not trainable"):
            call()
    with pytest.raises(Refused, match="not trainable"):
        engine.forward_backward([batch], PolicyLoss(), scale_of(batch))


def test_an_evaluation_gives_metrics_and_outputs_and_leaves_no_gradient(on, qwen3) -> None:
    engine, batch = build(qwen3), make_batch()
    with engine.eval_mode():
        first, second = engine.forward_backward(
            shares(batch, 0, 1, 2), PolicyLoss(), scale_of(batch), forward_only=True, outputs=frozenset({"entropy"})
        )
    assert first.outputs is not None
    assert set(first.outputs.keys()) == {"entropy"}
    assert not first.outputs["entropy"].requires_grad
    loss, _, _ = step(engine, batch)
    assert first.metrics["loss"].total + second.metrics["loss"].total == pytest.approx(loss, rel=1e-5)


def test_an_evaluation_between_backward_and_step_changes_no_gradient_even_if_it_fails(on, qwen3) -> None:
    def job(rank: int, world_size: int) -> None:
        class Failing(PolicyLoss):
            def __call__(self, outputs: Any, batch: Any, scale: Any) -> Any:
                raise Refused("the batch lacks a column")

        engine, undisturbed, batch = build(qwen3), build(qwen3), make_batch()
        for each in (engine, undisturbed):
            each.optimizer_zero_grad()
            each.forward_backward(shares(batch, rank, world_size, 2), PolicyLoss(), scale_of(batch))
            if each is engine:
                infer(each, make_batch(seed=1))
                with pytest.raises(Refused, match="lacks a column"):
                    each.forward_backward([batch], Failing(), scale_of(batch), forward_only=True)
        assert engine.optimizer_step() == undisturbed.optimizer_step()

    for world_size in (1, 2):
        on(world_size, job)


def test_filler_rows_change_nothing(on, qwen3) -> None:
    batch = make_batch((9, 5, 7, 0, 4))
    filled = batch.clone()
    filled["row_weight"][3] = 0.0
    plain = batch[[0, 1, 2, 4]].contiguous()
    a, b = build(qwen3), build(qwen3)
    assert step(a, filled)[0] == pytest.approx(step(b, with_metadata(plain, temperature=0.7))[0], rel=1e-5)


@pytest.mark.parametrize("options", [{"offload_parameters": True, "offload_optimizer": True}, {}])
def test_training_with_offloads_between_phases_is_the_same(on, qwen3, tmp_path, options) -> None:
    def job(rank: int, world_size: int) -> None:
        batches = [make_batch(seed=seed) for seed in range(3)]
        engine, resident = build(qwen3, **options), build(qwen3)
        for batch in batches:
            if not options:
                engine.to("cpu", model=True, optimizer=True, grad=True)
            with pytest.raises(Refused, match="on CPU"):
                engine.forward_backward([batch], None, scale_of(batch), forward_only=True, outputs=BOTH)
            away = weights(engine)  # exports from where they are
            assert all(torch.equal(each, away[name]) for name, each in weights(resident).items())
            engine.save_checkpoint(str(tmp_path / "a"), step=1)
            engine.load_checkpoint(str(tmp_path / "a"))
            if not options:
                engine.to("device", model=True, optimizer=True, grad=True)
            with engine.eval_mode():  # a mode within a mode does not send away what the outer one needs
                assert torch.equal(infer(engine, batch)["log_probs"], infer(resident, batch)["log_probs"])
            assert step(engine, batch, 2) == step(resident, batch, 2)

    for world_size in (1, 2):
        on(world_size, job)


def test_tied_embeddings_stay_one_parameter_through_offloads(on, qwen3) -> None:
    engine = build(qwen3)
    engine.to("cpu", model=True, optimizer=True, grad=True)
    engine.to("device", model=True, optimizer=True, grad=True)
    step(engine, make_batch())
    model = engine._ready().model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_an_engine_that_was_shut_down_says_so(on, qwen3) -> None:
    engine = build(qwen3)
    engine.shutdown()
    with pytest.raises(Refused, match="initialize"):
        engine.forward_backward([TensorDict({}, batch_size=[0])], None, LossScale(1, 1), forward_only=True)
    engine.initialize()
    assert step(engine, make_batch())[2] is False


def test_the_readmes_example_runs(on, qwen3, tmp_path, monkeypatch, capsys) -> None:
    readme = Path(__file__).parent.parent / "README.md"
    code = readme.read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)  # this process has its world already
    exec(code.replace("path/to/model", qwen3), {})
    assert "skipped=False" in capsys.readouterr().out
    assert (tmp_path / "step-1" / "manymesh.json").is_file()
