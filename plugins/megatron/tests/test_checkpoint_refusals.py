"""What cannot be written or read as a checkpoint is refused on all ranks, and hurts nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron_steps import checkpoint_tensors, engine_of, step
from named_models import differing

from core.errors import Refused
from manymesh.parts.checkpoint_directory import MANIFEST
from sdk.reference import make_batch

BATCHES = [make_batch(seed=seed) for seed in range(2)]


@pytest.fixture(scope="session")
def qwen3(model_dir: Callable[..., str]) -> str:
    return model_dir("qwen3", num_layers=2)


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
    "one rank's file is overwritten": (overwrite("__1*.distcp"), "damaged"),
    "the index is overwritten": (overwrite(".metadata"), "damaged"),
    "the manifest is overwritten": (lambda path: (path / MANIFEST).write_text("{"), MANIFEST),
    "the manifest is missing": (lambda path: (path / MANIFEST).unlink(), "no checkpoint"),
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
