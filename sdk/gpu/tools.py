"""What the steps share: a world of one, engines for the time of a block, time and memory on the device, models."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from core.device import join_world
from core.registry import EngineRegistry
from sdk.gpu.step import Absent, StepRun

GIB = 2**30


def lone_world() -> None:
    """Open this process's world of one; a second call changes nothing."""
    join_world(0, 1, dist.HashStore(), timeout_s=60)


@contextmanager
def built(run: StepRun, backend: str, kind: str = "engine", **options: Any) -> Iterator[Any]:
    """A backend of the registry on the step's device, initialized, for the time of a block.

    Raises:
        Absent: it is not installed, or lacks a dependency.
    """
    need_backend(backend, kind)
    lone_world()
    backend_object = EngineRegistry.new(None, backend, options, run.device, kind=kind)
    assert backend_object is not None
    try:
        backend_object.initialize()
        yield backend_object
    finally:
        backend_object.shutdown()
        del backend_object
        free_memory(run)


def need_backend(backend: str, kind: str) -> None:
    """Raises Absent where the registry has no such backend that can be used."""
    try:
        EngineRegistry.get(backend, kind=kind)
    except Exception as error:
        raise Absent(" ".join(str(error).split())[:300]) from error


def free_memory(run: StepRun) -> None:
    """Let go of what nobody holds, so that the next figure is its own."""
    gc.collect()
    if run.on_cuda:
        torch.cuda.empty_cache()


def wait_for_device(run: StepRun) -> None:
    if run.on_cuda:
        torch.cuda.synchronize()


def seconds_of(run: StepRun, call: Callable[[], object], *, repeats: int = 3, warm_up: int = 1) -> float:
    """The shortest time of a call, with all that the device does of it."""
    for _ in range(warm_up):
        call()
    times = []
    for _ in range(repeats):
        wait_for_device(run)
        start = time.perf_counter()
        call()
        wait_for_device(run)
        times.append(time.perf_counter() - start)
    return min(times)


def peak_of(run: StepRun, call: Callable[[], object]) -> int:
    """Bytes that a call allocates at its peak, above those before it. Raises Absent on a CPU."""
    run.need_cuda()
    free_memory(run)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    wait_for_device(run)
    return torch.cuda.max_memory_allocated() - before


def model_for_device(run: StepRun) -> str:
    """A directory with a model of the run's own: about a billion random parameters in bf16 on a GPU, a tiny one on a
    CPU. Qwen3's shape and a tokenizer of one character a token; made once in a run."""
    directory = Path(run.folder, "model")
    if not directory.exists():
        half = directory.with_name("model.half")
        _write_model(run, half)
        half.rename(directory)
    return str(directory)


def _write_model(run: StepRun, directory: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from sdk.testing import character_tokenizer

    sizes = (
        {"vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 18}
        if run.on_cuda
        else {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    )
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128} if run.on_cuda else {"head_dim": 32}
    config = Qwen3Config(
        **({"num_attention_heads": 4, "num_key_value_heads": 2} | sizes | heads),
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        # Predictions far from uniform, so that rounding doesn't change which token is likeliest.
        initializer_range=0.02 if run.on_cuda else 0.3,
    )
    torch.manual_seed(0)
    with torch.device(run.device):
        model = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16 if run.on_cuda else torch.float32).save_pretrained(directory)
    character_tokenizer(directory)
    del model
    free_memory(run)
