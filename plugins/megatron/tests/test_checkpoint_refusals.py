"""What cannot be written or read as a checkpoint is refused on all ranks, and hurts nothing."""

from __future__ import annotations

import json
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron_steps import checkpoint_tensors, engine_of, step, weights
from named_models import differing

from core.errors import Refused
from sdk.parts.checkpoint_directory import MANIFEST
from sdk.reference import make_batch

BATCHES = [make_batch(seed=seed) for seed in range(2)]


@pytest.fixture(scope="session")
def qwen3(model_dir: Callable[..., str]) -> str:
    return model_dir("qwen3", num_layers=2)


@pytest.mark.parametrize(("full_rank", "room"), [(0, 20_000), (1, 1_000)])  # between tensors, and within one
def test_a_full_disk_is_refused_on_all_ranks_and_the_older_checkpoint_stays(
    on, qwen3, tmp_path, full_rank, room
) -> None:
    path = str(tmp_path / "ckpt")

    def job(rank: int, world_size: int) -> tuple[str, int, int]:
        with engine_of(qwen3, tensor_parallel=2) as engine:
            start = weights(engine)
            engine.save_checkpoint(path, step=1)
            step(engine, BATCHES[0])
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            if rank == full_rank:
                resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
            with pytest.raises(Refused) as refusal:
                engine.save_checkpoint(path, step=2)
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert [entry.name for entry in tmp_path.iterdir()] == ["ckpt"]
            trained = weights(engine)
            older = engine.load_checkpoint(path)
            assert differing(weights(engine), start) == []
            step(engine, BATCHES[0])
            assert differing(weights(engine), trained) == []
            engine.save_checkpoint(path, step=3)  # room again
            return str(refusal.value), older, engine.load_checkpoint(path)

    for message, older, newer in on(2, job):
        assert "File too large" in message
        assert f"rank {full_rank}" in message
        assert str(tmp_path / "ckpt.partial") in message
        assert (older, newer) == (1, 3)


def test_an_index_that_cannot_be_written_is_refused_on_all_ranks(on, qwen3, tmp_path) -> None:
    def job(rank: int, world_size: int) -> None:
        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        with engine_of(qwen3, tensor_parallel=2) as engine:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(dcp.FileSystemWriter, "finish", full)
                with pytest.raises(Refused, match="No space left"):
                    engine.save_checkpoint(str(tmp_path / "a"), step=1)
            assert list(tmp_path.iterdir()) == []
            step(engine, BATCHES[0])

    on(2, job)


def test_a_path_that_cannot_be_made_is_refused_on_all_ranks(on, qwen3, tmp_path) -> None:
    (tmp_path / "file").write_text("in the way")

    def job(rank: int, world_size: int) -> None:
        with engine_of(qwen3, tensor_parallel=2) as engine:
            with pytest.raises(Refused, match="Not a directory"):
                engine.save_checkpoint(str(tmp_path / "file" / "ckpt"), step=1)
            step(engine, BATCHES[0])

    on(2, job)


def cut(path: Path) -> None:
    file = next(path.glob("__1*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])


def overwrite(name: str) -> Callable[[Path], None]:
    """Bytes of one file, of which the manifest knows the number only."""

    def spoil(path: Path) -> None:
        file = next(path.glob(name))
        file.write_bytes(b"x" * file.stat().st_size)

    return spoil


def of_another_engine(path: Path) -> None:
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(manifest | {"engine": "fsdp"}))


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "one rank's file is cut": (cut, "damaged"),
    "one rank's file is overwritten": (overwrite("__1*.distcp"), "damaged"),
    "the index is overwritten": (overwrite(".metadata"), "damaged"),
    "the manifest is overwritten": (lambda path: (path / MANIFEST).write_text("{"), MANIFEST),
    "the manifest is missing": (lambda path: (path / MANIFEST).unlink(), "no checkpoint"),
    "nothing is there": (shutil.rmtree, "no checkpoint"),
    "it is another engine's": (of_another_engine, "another engine"),
}


def test_what_cannot_be_read_is_refused_on_all_ranks_with_nothing_changed(on, qwen3, tmp_path) -> None:
    def job(rank: int, world_size: int) -> list[str]:
        with engine_of(qwen3, tensor_parallel=2) as engine:
            engine.save_checkpoint(str(tmp_path / "whole"), step=1)
            step(engine, BATCHES[0])
            engine.save_checkpoint(str(tmp_path / "before"), step=2)
            messages = []
            for number, (spoil, _) in enumerate(SPOILT.values()):
                path = tmp_path / str(number)
                if rank == 0:
                    spoil(Path(shutil.copytree(tmp_path / "whole", path)))
                dist.barrier()
                with pytest.raises(Refused) as refusal:
                    engine.load_checkpoint(str(path))
                messages.append(str(refusal.value))
            engine.save_checkpoint(str(tmp_path / "after"), step=2)
            step(engine, BATCHES[1])
            return messages

    answers = on(2, job)
    for (_, message), text in zip(SPOILT.values(), answers[0], strict=True):
        assert message in text
    assert answers[0] == answers[1]
    have, want = checkpoint_tensors(tmp_path / "after"), checkpoint_tensors(tmp_path / "before")
    assert differing(have, want) == []


def test_a_checkpoint_of_another_model_is_refused_with_nothing_changed(on, qwen3, model_dir, tmp_path) -> None:
    other, path = model_dir("qwen3", num_layers=4), str(tmp_path / "other")

    def job(rank: int, world_size: int) -> str:
        with engine_of(other, tensor_parallel=2) as engine:
            engine.save_checkpoint(path, step=1)
        with engine_of(qwen3, tensor_parallel=2) as engine:
            step(engine, BATCHES[0])
            before = weights(engine)
            with pytest.raises(Refused) as refusal:
                engine.load_checkpoint(path)
            assert differing(weights(engine), before) == []
            step(engine, BATCHES[1])
        return str(refusal.value)

    for message in on(2, job):
        assert "another model" in message
        assert "model.layers.2.self_attn.q_proj.weight" in message


def test_a_reference_loads_the_policys_checkpoint_but_not_the_other_way_round(on, qwen3, tmp_path) -> None:
    def job(rank: int, world_size: int) -> None:
        with (
            engine_of(qwen3, tensor_parallel=2) as policy,
            engine_of(qwen3, tensor_parallel=2, trainable=False) as reference,
        ):
            step(policy, BATCHES[0])
            policy.save_checkpoint(str(tmp_path / "policy"), step=1)
            assert reference.load_checkpoint(str(tmp_path / "policy")) == 1
            assert differing(weights(reference), weights(policy)) == []
            reference.save_checkpoint(str(tmp_path / "reference"), step=1)
            with pytest.raises(Refused, match="no optimizer state"):
                policy.load_checkpoint(str(tmp_path / "reference"))

    on(2, job)
