"""What is this engine's own around a step: layouts, optimizers, what it refuses; the rest is in the kit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_steps import engine_of, infer, step, weights

from core.config import OptimizerConfig
from core.engine import Engine
from core.errors import ConfigError, Refused
from manymesh_megatron.config import MegatronConfig
from manymesh_megatron.engine import MegatronEngine
from manymesh_megatron.offload import gradient_tensors
from sdk.reference import BOTH, TEMPERATURE, PolicyLoss, make_batch, movement_error, scale_of


@pytest.fixture(scope="session")
def qwen3(model_dir: Callable[..., str]) -> str:
    return model_dir("qwen3")


def test_the_mesh_is_there_before_the_model(on, qwen3) -> None:
    def job(rank: int, world_size: int) -> None:
        engine = MegatronEngine(MegatronConfig(qwen3, tensor_parallel=2, pipeline_parallel=2), "cpu")
        try:
            assert isinstance(engine, Engine)
            assert (engine.mesh.rank, engine.mesh.dp_rank, engine.mesh.dp_size) == (rank, 0, 1)
            assert engine.mesh.is_collect is (rank == 2)
            for axes in (("tp",), ("pp",), ("tp", "pp"), ("dp",), ("cp", "dp")):
                ranks = dist.get_process_group_ranks(engine.mesh.group(*axes))
                assert tuple(ranks) == engine.mesh.layout.group_of(rank, *axes)
            with pytest.raises(Refused, match="axes"):
                engine.mesh.group("pp", "dp")
            with pytest.raises(Refused, match="initialize"):
                engine.optimizer_zero_grad()
        finally:
            engine.shutdown()

    on(4, job)


def test_engines_of_one_process_share_a_layout(on, qwen3) -> None:
    def job(rank: int, world_size: int) -> None:
        with engine_of(qwen3, tensor_parallel=2) as actor, engine_of(qwen3, tensor_parallel=2, trainable=False) as ref:
            with pytest.raises(Refused, match="share one layout"):
                MegatronEngine(MegatronConfig(qwen3, pipeline_parallel=2), "cpu")
            batch = make_batch()
            before = infer(ref, batch)
            step(actor, batch)
            ours, theirs = infer(actor, batch), infer(ref, batch)
        assert before is not None
        assert ours is not None
        assert theirs is not None
        assert torch.equal(before["log_probs"], theirs["log_probs"])
        assert not torch.equal(ours["log_probs"], theirs["log_probs"])
        with engine_of(qwen3, pipeline_parallel=2):  # with both gone, another layout
            pass

    on(2, job)


def spoiled(source: str, directory: Path, how: str) -> str:
    shutil.copytree(source, directory / how)
    changes: dict[str, dict[str, Any]] = {
        "a layer more": {"num_hidden_layers": 6, "layer_types": ["full_attention"] * 6},
        "unknown": {"model_type": "qwen99"},
    }
    config = directory / how / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes[how]))
    return str(directory / how)


@pytest.mark.parametrize("how", ["a layer more", "unknown"])
def test_a_directory_without_a_whole_model_is_refused_on_all_ranks(on, qwen3, tmp_path, how) -> None:
    at = spoiled(qwen3, tmp_path, how)

    def job(rank: int, world_size: int) -> str:
        with pytest.raises(Refused) as refusal, engine_of(at, pipeline_parallel=2):
            pass
        return str(refusal.value)

    first, second = on(2, job)
    assert first == second
    assert at in first


def test_what_megatron_does_not_know_or_take_is_refused(on, qwen3) -> None:
    def job(rank: int, world_size: int) -> None:
        with pytest.raises(ConfigError, match="no field 'num_layerz'"), engine_of(qwen3, transformer={"num_layerz": 1}):
            pass
        with pytest.raises(Refused, match="megatron-core refuses"), engine_of(qwen3, transformer={"fp8_param": True}):
            pass
        with pytest.raises(Refused, match="TransformerEngine"), engine_of(qwen3, layer_spec="transformer_engine"):
            pass

    on(1, job)


def test_micro_batches_that_a_layout_cannot_run_are_refused_with_its_limits(on, qwen3) -> None:
    def job(rank: int, world_size: int) -> None:
        batch = make_batch((8, 6))
        with engine_of(qwen3, pipeline_parallel=2, virtual_pipeline=2) as engine:
            assert engine.limits.micro_batch_multiple == 2
            with engine.train_mode(), pytest.raises(Refused, match="positive multiple of 2 micro-batches"):
                engine.forward_backward([batch], PolicyLoss(), scale_of(batch))
        odd = make_batch((7, 6))
        with engine_of(qwen3, context_parallel=2) as engine:
            assert engine.limits.sequence_multiple == 4
            with engine.train_mode(), pytest.raises(Refused, match="multiple of 4 tokens"):
                engine.forward_backward([odd], PolicyLoss(), scale_of(odd))

    on(2, job)


@pytest.mark.parametrize(
    "options", [pytest.param({"distributed_optimizer": False}, marks=pytest.mark.ci), {"dtype": "bfloat16"}]
)
def test_gradients_that_are_not_finite_change_nothing(on, qwen3, options) -> None:
    """One rank's bad row is enough, and all ranks skip."""

    def job(rank: int, world_size: int) -> None:
        batch = make_batch()
        with engine_of(qwen3, **options) as engine, engine_of(qwen3, **options) as undisturbed:
            step(engine, batch)
            step(undisturbed, batch)
            before = weights(engine)
            bad = batch.clone()
            bad["advantages"][0] = float("inf")
            norm, skipped = step(engine, bad)
            assert skipped
            assert not torch.tensor(norm).isfinite()
            assert all(torch.equal(each, before[name]) for name, each in weights(engine).items())
            undisturbed.lr_scheduler_step()
            assert step(engine, batch) == step(undisturbed, batch)  # the moments are what they were
            want = weights(undisturbed)
            assert all(torch.equal(each, want[name]) for name, each in weights(engine).items())

    on(2, job)


@pytest.mark.parametrize(
    ("configured", "distributed", "dtype"),
    [
        pytest.param(True, False, "float32", id="by config, plain, float32", marks=pytest.mark.ci),
        pytest.param(False, False, "bfloat16", id="by to(), plain, bfloat16", marks=pytest.mark.ci),
        pytest.param(True, True, "bfloat16", id="by config, distributed, bfloat16"),
    ],
)
def test_training_with_offloads_between_phases_is_the_same(on, qwen3, configured, distributed, dtype) -> None:
    def job(rank: int, world_size: int) -> None:
        options: dict[str, Any] = {"distributed_optimizer": distributed, "dtype": dtype}
        offload = {"offload_parameters": True, "offload_optimizer": True} if configured else {}
        with engine_of(qwen3, **options, **offload) as engine, engine_of(qwen3, **options) as resident:
            for seed in range(3):
                batch = make_batch(seed=seed)
                if not configured:
                    engine.to("cpu", model=True, optimizer=True, grad=True)
                with pytest.raises(Refused, match="on CPU"):
                    engine.forward_backward([batch], None, scale_of(batch), forward_only=True, outputs=BOTH)
                assert all(not each.untyped_storage().nbytes() for each in engine._ready().models[0].parameters())
                away = {}
                for name, tensor in engine.export_weights():
                    away[name] = tensor
                    assert not gradient_bytes(engine)
                assert all(torch.equal(each, away[name]) for name, each in weights(resident).items())
                with engine.eval_mode():
                    assert not gradient_bytes(engine)
                with engine.train_mode():
                    assert gradient_bytes(engine) == gradient_bytes(resident) > 0
                if not configured:
                    engine.to("cpu", model=False, optimizer=False, grad=True)
                    with pytest.raises(Refused, match="grad is on CPU"):
                        engine.forward_backward([batch], PolicyLoss(), scale_of(batch))
                    engine.to("device", model=True, optimizer=True, grad=True)
                with engine.eval_mode():  # a mode within a mode does not send away what the outer one needs
                    ours, theirs = infer(engine, batch), infer(resident, batch)
                assert ours is not None
                assert theirs is not None
                assert torch.equal(ours["log_probs"], theirs["log_probs"])
                assert step(engine, batch) == step(resident, batch)

    on(2, job)


def gradient_bytes(engine: MegatronEngine) -> int:
    return sum(each.untyped_storage().nbytes() for each in gradient_tensors(engine._ready().chunks))


def test_bf16_trains_on_fp32_copies(on, qwen3) -> None:
    """Many small steps move the weights, where bf16 alone would round each away."""

    def job(rank: int, world_size: int) -> tuple[float, torch.dtype]:
        batch = make_batch((9, 5, 7, 4))
        optimizer = OptimizerConfig(lr=1e-4, weight_decay=0.0)
        changes = []
        for dtype in ("float32", "bfloat16"):
            with engine_of(qwen3, tensor_parallel=2, dtype=dtype, optimizer=optimizer) as engine:
                start = {name: each.float() for name, each in weights(engine).items()}
                for _ in range(10):
                    step(engine, batch, 1)
                end = weights(engine)
                changes.append({name: each.float() - start[name] for name, each in end.items()})
        dtype_of = next(iter(end.values())).dtype
        zero = {name: torch.zeros_like(each) for name, each in changes[0].items()}
        return movement_error(changes[1], changes[0], zero), dtype_of

    for error, dtype in on(2, job):
        assert dtype == torch.bfloat16
        assert error < 0.3


def test_weight_decay_leaves_norms_and_biases_alone(on, model_dir) -> None:
    """With no gradient to speak of, matrices shrink by lr * decay and the rest stays."""
    path = model_dir("qwen2")

    def job(rank: int, world_size: int) -> None:
        with engine_of(path, tensor_parallel=2, optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.5)) as engine:
            before, batch = weights(engine), make_batch()
            batch["row_weight"].zero_()
            with engine.train_mode():
                engine.optimizer_zero_grad()
                engine.forward_backward([batch], PolicyLoss(), scale_of(make_batch()), temperature=TEMPERATURE)
                engine.optimizer_step()
            for name, after in weights(engine).items():
                want = before[name] * (1 - 1e-2 * 0.5) if after.ndim > 1 else before[name]
                torch.testing.assert_close(after, want, atol=1e-6, rtol=1e-6)

    on(2, job)


def test_the_shim_changes_nothing_outside_and_is_not_for_cuda(on, monkeypatch) -> None:
    from manymesh_megatron.cpu_shim import on_cpu

    names = ("current_device", "synchronize", "Stream", "get_rng_state", "stream")
    before = [getattr(torch.cuda, name) for name in names]
    with on_cpu(), on_cpu():
        assert torch.cuda.current_device() == torch.device("cpu")
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert type(None) in (torch.cuda.Stream | None).__args__  # as an annotation of a module imported meanwhile
    assert [getattr(torch.cuda, name) for name in names] == before
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(Refused, match="not for machines with CUDA"), on_cpu():
        pass
