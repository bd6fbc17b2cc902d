"""Steps 04 to 07: the FSDP engine."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch

from core.errors import Refused
from sdk.gpu.kit import run_kit
from sdk.gpu.step import StepRun
from sdk.gpu.tools import GIB, built, free_memory, model_for_device, peak_of, seconds_of
from sdk.gpu.training import Rows, bare_step, train_step, weights_of
from sdk.reference import movement_error
from sdk.testing import tiny_model

ENGINE_SUITES = {
    "NumbersSuite": "engine_numbers",
    "LifeSuite": "engine_life",
    "WeightsSuite": "engine_weights",
    "CheckpointSuite": "engine_checkpoint",
}
# Parameters in fp32, passes in bf16.
MIXED = {"dtype": "float32", "compute_dtype": "bfloat16"}
LIMIT = 1e-3  # of what a step moves, where it should be the same


def engine_suite(run: StepRun) -> None:
    """The kit in fp32."""
    run_kit(run, "engine", "fsdp", ENGINE_SUITES, {"dtype": "float32", "compute_dtype": "float32"})


def mixed_precision(run: StepRun) -> None:
    """Speed, waits and memory of training in bf16."""
    model, num_micro = model_for_device(run), 4
    rows = Rows(run, num_rows=8, width=1024) if run.on_cuda else Rows(run, num_rows=4, width=32)
    options: dict[str, Any] = {"model": model, "gradient_checkpointing": True, "optimizer": {"lr": 1e-6}}
    speeds = {}
    with run.part("training in bf16"), built(run, "fsdp", **options, **MIXED) as engine:
        seconds = seconds_of(run, lambda: train_step(engine, rows, num_micro))
        speeds["bf16"] = rows.num_tokens / seconds
        run.figure("fp32 parameters, passes in bf16", speeds["bf16"], "tokens/s")
        with run.part("waits for the device"):
            run.need_cuda()
            one, four = (_waits(partial(train_step, engine, rows, number)) for number in (1, 4))
            run.figure("waits in a step of 4 micro-batches", four, "")
            run.check("they don't grow with micro-batches", four <= one, f"{one} with one, {four} with four")
        with run.part("memory by micro-batches"):
            whole, parts = (peak_of(run, partial(train_step, engine, rows, number)) for number in (1, 4))
            run.figure("peak of a step of 1 micro-batch", whole / GIB, "GiB")
            run.figure("peak of a step of 4 micro-batches", parts / GIB, "GiB")
            run.check("four micro-batches take no more than one", parts <= 1.05 * whole)
    with run.part("a bare loop on FSDP2"):
        step = bare_step(run, model, rows, num_micro)
        bare = rows.num_tokens / seconds_of(run, step)
        run.figure("a bare loop on FSDP2", bare, "tokens/s", f"ours is {speeds.get('bf16', 0) / bare:.2f} of it")
        del step
        free_memory(run)
    with (
        run.part("training in fp32"),
        built(run, "fsdp", **options, dtype="float32", compute_dtype="float32") as engine,
    ):
        single = rows.num_tokens / seconds_of(run, lambda: train_step(engine, rows, num_micro), repeats=1)
        run.figure("all in fp32", single, "tokens/s", f"bf16 is {speeds.get('bf16', 0) / single:.1f} times as fast")


def _waits(call: Any) -> int:
    """How often a call waits for the device, by PyTorch's own count."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) for each in caught)


def small_steps(run: StepRun) -> None:
    """Steps far smaller than bf16's own: they must move the parameters, or be refused."""
    model = tiny_model(Path(run.folder, "small"), initializer_range=0.3)
    rows = Rows(run, num_rows=4, width=32)
    for name, options in {"fp32 parameters, passes in bf16": MIXED, "bf16 parameters": {"dtype": "bfloat16"}}.items():
        with run.part(name):
            try:
                with built(run, "fsdp", model=model, optimizer={"lr": 1e-6}, **options) as engine:
                    start = weights_of(engine)
                    for _ in range(20):
                        train_step(engine, rows)
                    moved = _moved(start, weights_of(engine))
            except Refused as refused:
                run.check(f"{name}: refused", name == "bf16 parameters", refused.message)
                continue
            run.check(f"{name}: 20 steps of lr 1e-6 move more than half", moved > 0.5, f"{moved:.1%} moved")


def _moved(start: dict[str, torch.Tensor], end: dict[str, torch.Tensor]) -> float:
    changed = sum(int((start[name] != end[name]).sum()) for name in start)
    return changed / sum(value.numel() for value in start.values())


def offload(run: StepRun) -> None:
    """State that waits on the CPU, and checkpoints of it."""
    model, rows = model_for_device(run), Rows(run, num_rows=4, width=32)
    options: dict[str, Any] = {"model": model, "optimizer": {"lr": 1e-4}, **MIXED}
    with run.part("without offload"), built(run, "fsdp", **options) as engine:
        start = weights_of(engine)
        num_parameters = sum(value.numel() for value in start.values())
        train_step(engine, rows)
        _after_a_step(run, num_parameters)
        train_step(engine, rows)
        want = weights_of(engine)
    with run.part("to CPU and back"), built(run, "fsdp", **options) as engine:
        train_step(engine, rows)
        _there_and_back(run, engine, num_parameters)
        train_step(engine, rows)
        error = movement_error(weights_of(engine), want, start)
        run.check("the next step is the same", error < LIMIT, f"relative error {error:.2g}")
    away: dict[str, Any] = {**options, "offload_parameters": True, "offload_optimizer": True}
    with run.part("a checkpoint of offloaded state"):
        path = str(Path(run.folder, "checkpoint"))
        with built(run, "fsdp", **away) as engine:
            train_step(engine, rows)
            engine.save_checkpoint(path, step=1)
            train_step(engine, rows)
            error = movement_error(weights_of(engine), want, start)
            run.check("steps with offload are the same", error < LIMIT, f"relative error {error:.2g}")
        with built(run, "fsdp", **away) as engine:
            engine.load_checkpoint(path)
            train_step(engine, rows)
            error = movement_error(weights_of(engine), want, start)
            run.check("training goes on from a checkpoint", error < LIMIT, f"relative error {error:.2g}")


def _after_a_step(run: StepRun, num_parameters: int) -> None:
    if run.on_cuda:
        state = 12 * num_parameters  # fp32 parameters, and AdamW's two
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        run.figure("held after a step, above parameters and optimizer", (allocated - state) / GIB, "GiB")
        run.figure("kept by the allocator after a step", (reserved - allocated) / GIB, "GiB", "free to none but us")


def _there_and_back(run: StepRun, engine: Any, num_parameters: int) -> None:
    before = torch.cuda.memory_allocated() if run.on_cuda else 0
    moved = 12 * num_parameters

    def away() -> None:
        engine.to("cpu", model=True, optimizer=True, grad=True)

    def back() -> None:
        engine.to("device", model=True, optimizer=True, grad=True)

    run.figure("to CPU, the first time", moved / seconds_of(run, away, repeats=1, warm_up=0) / 1e9, "GB/s")
    if run.on_cuda:
        allocated = torch.cuda.memory_allocated()
        run.check("less than 5 % stays on the device", allocated < 0.05 * before, f"{allocated / GIB:.2f} GiB")
    run.figure("back", moved / seconds_of(run, back, repeats=1, warm_up=0) / 1e9, "GB/s")
    run.figure("to CPU again", moved / seconds_of(run, away, repeats=1, warm_up=0) / 1e9, "GB/s")
    back()
