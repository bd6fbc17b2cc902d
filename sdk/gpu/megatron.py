"""Step 10: the Megatron engine."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from sdk.gpu.fsdp import ENGINE_SUITES
from sdk.gpu.kit import run_kit
from sdk.gpu.step import StepRun
from sdk.gpu.tools import GIB, built, free_memory, model_for_device, need_backend, seconds_of
from sdk.gpu.training import Rows, train_step
from sdk.testing import tiny_model

IN_FP32 = {"dtype": "float32", "layer_spec": "local"}  # TransformerEngine's layers are refused in fp32
# On CPU the program is tested, not the engine, which has the kit in its own tests.
FEW = ("micro_batches", "refuse", "checkpoint", "whole", "full", "top_log", "again", "stream")


def engine(run: StepRun) -> None:
    """The kit in fp32 and, of its numbers, in bf16; speed; memory of eval_mode."""
    need_backend("megatron", "engine")
    has_te = importlib.util.find_spec("transformer_engine") is not None
    if not has_te:
        run.absent("TransformerEngine", "not installed: layers of Megatron's own")
    without = () if run.on_cuda else FEW
    with run.part("the kit in fp32"):
        run_kit(run, "engine", "megatron", ENGINE_SUITES, IN_FP32, title="the kit in fp32", without=without)
    with run.part("the kit in bf16"):
        _in_bf16(run)
    with run.part("speed"):
        _speed(run)
    with run.part("a mixture of experts"):
        _experts(run)
    with run.part("memory of eval_mode"):
        _memory(run)


def _in_bf16(run: StepRun) -> None:
    run.need_cuda()
    suites = {"NumbersSuite": "engine_numbers"}
    run_kit(
        run,
        "engine",
        "megatron",
        suites,
        {"dtype": "bfloat16"},
        title="numbers in bf16",
        without=("decay",),  # exact only where exported weights are the fp32 ones
        dtype="bfloat16",
    )


def _speed(run: StepRun) -> None:
    dtype = "bfloat16" if run.on_cuda else "float32"
    rows = Rows(run, num_rows=8, width=1024) if run.on_cuda else Rows(run, num_rows=4, width=32)
    options: dict[str, Any] = {"model": model_for_device(run), "dtype": dtype, "optimizer": {"lr": 1e-6}}
    with built(run, "megatron", **options) as made:
        seconds = seconds_of(run, lambda: train_step(made, rows, 4))
        run.figure(f"training in {dtype}", rows.num_tokens / seconds, "tokens/s")


def _experts(run: StepRun) -> None:
    """A step, a checkpoint and its end, of four experts."""
    model = tiny_model(Path(run.folder, "experts"), "qwen3_moe", initializer_range=0.1)
    rows = Rows(run, num_rows=4, width=32)
    options: dict[str, Any] = {"model": model, **IN_FP32, "optimizer": {"lr": 1e-3}}
    path = str(Path(run.folder, "experts-checkpoint"))
    with built(run, "megatron", **options) as made:
        train_step(made, rows)
        made.save_checkpoint(path, step=1)
        want = train_step(made, rows)
    with built(run, "megatron", **options) as made:
        made.load_checkpoint(path)
        have = train_step(made, rows)
    run.check(
        "a mixture of experts goes on from its checkpoint", abs(have - want) < 1e-3 * want, f"{have:.6g}, {want:.6g}"
    )


def _memory(run: StepRun) -> None:
    """What lies on the device in eval_mode, above nothing: bf16 weights alone, no buffers of gradients."""
    run.need_cuda()
    rows = Rows(run, num_rows=4, width=256)
    options: dict[str, Any] = {
        "model": model_for_device(run),
        "dtype": "bfloat16",
        "offload_parameters": True,
        "offload_optimizer": True,
    }
    with built(run, "megatron", **options) as made:
        train_step(made, rows)
        size = sum(torch.Size(spec.shape).numel() for spec in made.weight_specs())
        free_memory(run)
        away = torch.cuda.memory_allocated()
        with made.eval_mode():
            held = torch.cuda.memory_allocated() - away
        run.figure("held while everything is away", away / GIB, "GiB")
        run.check(
            "eval_mode holds the bf16 weights and no gradients",
            held < 1.25 * 2 * size,
            f"{held / GIB:.2f} GiB, the weights are {2 * size / GIB:.2f}",
        )
