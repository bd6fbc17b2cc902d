"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from megatron_steps import checkpoint_tensors, engine_of, step, weights
from named_models import differing

from core.errors import Refused
from manymesh.parts.checkpoint_directory import MANIFEST
from sdk.reference import make_batch

BATCHES = [make_batch(seed=seed) for seed in range(4)]


@pytest.fixture(scope="session")
def qwen3(model_dir: Callable[..., str]) -> str:
    return model_dir("qwen3", num_layers=2)


@contextmanager
def held_back(full_rank: int | None = None) -> Iterator[threading.Event]:
    """Files are written once the event is set; on `full_rank` they cannot be."""
    from manymesh_megatron import checkpoint, storage

    write, ready = storage.write_shards, threading.Event()

    def later(directory: Path, shards: Any, rank: int) -> Any:
        assert ready.wait(60)
        if rank == full_rank:
            raise OSError(28, "No space left on device")
        return write(directory, shards, rank)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "write_shards", later)
        yield ready


def written() -> None:
    """Wait until all ranks have written."""
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()
    dist.barrier()


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.ci)])
def test_a_checkpoint_is_of_the_moment_it_was_asked_for(on, qwen3, tmp_path, dtype) -> None:
    at_once, later = tmp_path / "at-once", tmp_path / "later"

    def job(rank: int, world_size: int) -> None:
        with engine_of(qwen3, dtype=dtype) as engine:
            step(engine, BATCHES[0])
            engine.save_checkpoint(str(at_once), step=1)
            for batch in BATCHES[1:]:
                step(engine, batch)
            want = weights(engine)
        with engine_of(qwen3, dtype=dtype, async_checkpoint=True) as engine, held_back() as ready:
            step(engine, BATCHES[0])
            engine.save_checkpoint(str(later), step=1)
            step(engine, BATCHES[1])
            ready.set()
            written()
            step(engine, BATCHES[2])
            assert (later / MANIFEST).exists()
            step(engine, BATCHES[3])
            assert differing(weights(engine), want) == []

    on(2, job)
    assert differing(checkpoint_tensors(later), checkpoint_tensors(at_once)) == []


def test_steps_do_not_wait_for_a_checkpoint_that_some_rank_still_writes(on, qwen3, tmp_path) -> None:
    path = tmp_path / "a"

    def job(rank: int, world_size: int) -> None:
        with engine_of(qwen3, tensor_parallel=2, async_checkpoint=True) as engine, held_back() as ready:
            engine.save_checkpoint(str(path), step=0)
            if rank == 0:
                ready.set()
            step(engine, BATCHES[0])
            dist.barrier()
            assert not path.exists()
            ready.set()
            written()
            step(engine, BATCHES[1])
            assert path.exists()

    on(2, job)


def test_the_next_save_load_or_shutdown_waits_for_a_checkpoint(on, qwen3, tmp_path) -> None:
    a, b, c = (tmp_path / name for name in "abc")

    def job(rank: int, world_size: int) -> None:
        with held_back() as ready, engine_of(qwen3, tensor_parallel=2, async_checkpoint=True) as engine:
            start = weights(engine)
            engine.save_checkpoint(str(a), step=1)
            step(engine, BATCHES[0])
            ready.set()
            engine.save_checkpoint(str(b), step=2)
            assert (a / MANIFEST).exists()
            assert engine.load_checkpoint(str(b)) == 2
            assert engine.load_checkpoint(str(a)) == 1
            assert differing(weights(engine), start) == []
            engine.save_checkpoint(str(c), step=3)
        assert (c / MANIFEST).exists()
        assert psutil.Process().children(recursive=True) == []
        assert not [each for each in threading.enumerate() if each.name == "checkpoint"]

    on(2, job)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "occasion", ["step", *(pytest.param(name, marks=pytest.mark.ci) for name in ("save", "load", "settle", "shutdown"))]
)
def test_what_went_wrong_in_the_background_is_refused_on_all_ranks_at_the_next_occasion(
    on, qwen3, tmp_path, occasion
) -> None:
    older = str(tmp_path / "a")

    def job(rank: int, world_size: int) -> str:
        with engine_of(qwen3, tensor_parallel=2, async_checkpoint=True) as engine:
            engine.save_checkpoint(older, step=1)
            step(engine, BATCHES[0])
            with held_back(full_rank=1) as ready:
                engine.save_checkpoint(older, step=2)
                ready.set()
                written()
            occasions: dict[str, Callable[[], object]] = {
                "step": lambda: step(engine, BATCHES[1]),
                "save": lambda: engine.save_checkpoint(str(tmp_path / "b"), step=3),
                "load": lambda: engine.load_checkpoint(older),
                "settle": engine.settle_checkpoint,
                "shutdown": engine.shutdown,
            }
            with pytest.raises(Refused) as refusal:
                occasions[occasion]()
            if occasion != "shutdown":  # it is told once
                step(engine, BATCHES[1])
                assert engine.load_checkpoint(older) == 1
        with engine_of(qwen3, pipeline_parallel=2) as engine:  # the groups were freed
            assert engine.load_checkpoint(older) == 1
        return str(refusal.value)

    for message in on(2, job):
        assert "No space left on device" in message
        assert "rank 1" in message
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]
