"""A checkpoint's directory is whole or not there, and what cannot be read into an engine is refused beforehand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist

from core.errors import Refused
from manymesh.parts import checkpoint_directory
from manymesh.parts.checkpoint_directory import MANIFEST, Contents
from sdk.testing import Worlds

CONTENTS = Contents(
    engine="mine", step=3, schedule_step=2, model_type="tiny", world_size=2, parameters={"w": [2, 3]}, optimizer=True
)


class LibraryError(Exception):
    """What a writer's library raises, which is no OSError."""


def files_of(rank: int, *, text: str = "x") -> Callable[[Path], None]:
    """A writer of one file a rank, in a folder of its own."""

    def job(partial: Path) -> None:
        (partial / f"rank_{rank}").mkdir()
        (partial / f"rank_{rank}" / "shard").write_text(text * (rank + 1))

    return job


def save(rank: int, world_size: int, path: str, contents: Contents = CONTENTS) -> None:
    checkpoint_directory.save(path, contents, files_of(rank), dist.group.WORLD)


def test_every_ranks_files_are_listed_with_their_sizes_and_read_back(on: Worlds, tmp_path: Path) -> None:
    path = tmp_path / "new" / "a"
    on(2, save, str(path))
    assert [entry.name for entry in path.parent.iterdir()] == ["a"]
    manifest = json.loads((path / MANIFEST).read_text())
    assert manifest["files"] == {"rank_0/shard": 1, "rank_1/shard": 2}
    assert (manifest["engine"], manifest["format"]) == ("mine", 1)

    def job(rank: int, world_size: int) -> Contents:
        return checkpoint_directory.check(str(path), CONTENTS, dist.group.WORLD)

    assert on(2, job) == [attrs.evolve(CONTENTS, files=manifest["files"])] * 2


@pytest.mark.parametrize("failing_rank", [0, 1])
@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (OSError(28, "No space left on device"), "cannot write .*No space left on device"),
        (LibraryError("writer died"), "cannot write .*writer died"),
        (Refused("the writer has no room"), "the writer has no room"),
    ],
    ids=["OSError", "library", "Refused"],
)
def test_where_one_rank_cannot_write_all_refuse_and_the_older_stays(
    on: Worlds, tmp_path: Path, failing_rank: int, failure: Exception, message: str
) -> None:
    path = str(tmp_path / "a")

    def job(rank: int, world_size: int) -> tuple[str, int]:
        def broken(partial: Path) -> None:
            files_of(rank)(partial)
            if rank == failing_rank:
                raise failure

        group = dist.group.WORLD
        save(rank, world_size, path)
        newer = attrs.evolve(CONTENTS, step=4)
        with pytest.raises(Refused, match=message) as refusal:
            checkpoint_directory.save(path, newer, broken, group, failures=(LibraryError,))
        return str(refusal.value), checkpoint_directory.check(path, CONTENTS, group).step

    (first, step), second = on(2, job)
    assert (first, step) == second
    assert step == 3
    assert isinstance(failure, Refused) or f"rank {failing_rank}" in first
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_a_manifest_that_cannot_be_written_is_refused_on_all_ranks_and_the_older_stays(
    on: Worlds, tmp_path: Path
) -> None:
    path = str(tmp_path / "a")

    def job(rank: int, world_size: int) -> int:
        def in_the_way(partial: Path) -> None:
            (partial / MANIFEST).mkdir(exist_ok=True)

        save(rank, world_size, path)
        with pytest.raises(Refused, match="Is a directory"):
            checkpoint_directory.save(path, CONTENTS, in_the_way, dist.group.WORLD)
        return checkpoint_directory.check(path, CONTENTS, dist.group.WORLD).step

    assert on(2, job) == [3, 3]
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_until_it_is_finished_a_save_in_steps_leaves_the_older_in_its_place(on: Worlds, tmp_path: Path) -> None:
    """As a writer does that goes on in the background."""
    path = str(tmp_path / "a")

    def job(rank: int, world_size: int) -> list[int]:
        group, steps = dist.group.WORLD, []
        save(rank, world_size, path)
        for end in (checkpoint_directory.discard, checkpoint_directory.finish):
            partial = checkpoint_directory.prepare(path, group)
            files_of(rank)(partial)
            dist.barrier()
            steps.append(checkpoint_directory.check(path, CONTENTS, group).step)
            args = (attrs.evolve(CONTENTS, step=4), group) if end is checkpoint_directory.finish else (group,)
            end(partial, *args)
            steps.append(checkpoint_directory.check(path, CONTENTS, group).step)
        return steps

    assert on(2, job) == [[3, 3, 3, 4]] * 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def spoil(path: Path, how: str) -> None:
    manifest = path / MANIFEST
    if how == "cut":
        (path / "rank_1" / "shard").write_text("x")
    elif how == "file missing":
        (path / "rank_0" / "shard").unlink()
    elif how == "interrupted":
        path.rename(path.with_name("a.older"))
    elif how == "unfinished":
        manifest.unlink()
    else:
        manifest.write_text("{" if how == "no JSON" else json.dumps(json.loads(manifest.read_text()) | {"format": 2}))


@pytest.mark.parametrize(
    ("how", "change", "message"),
    [
        ("cut", {}, r"damaged(.|\n)*rank_1/shard: 1 bytes(.|\n)*2 bytes"),
        ("file missing", {}, "rank_0/shard: missing"),
        ("interrupted", {}, r"no checkpoint(.|\n)*a\.older"),
        ("unfinished", {}, "without manymesh.json"),
        ("no JSON", {}, "cannot read"),
        ("format", {}, "another format"),
        (None, {"engine": "other"}, "another engine"),
        (None, {"parameters": {"w": [2, 4]}}, r"another model(.|\n)*\[2, 3\]"),
        (None, {"parameters": {"w": [2, 3], "v": [1]}}, r"another model(.|\n)*1 of 2"),
        (None, {"model_type": "huge"}, "another model"),
    ],
)
def test_what_cannot_be_loaded_is_refused_on_all_ranks(
    on: Worlds, tmp_path: Path, how: str | None, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "a"
    on(2, save, str(path))
    if how:
        spoil(path, how)

    def job(rank: int, world_size: int) -> None:
        with pytest.raises(Refused, match=message):
            checkpoint_directory.check(str(path), attrs.evolve(CONTENTS, **change), dist.group.WORLD)

    on(2, job)


def test_optimizer_state_is_wanted_by_trainers_alone(on: Worlds, tmp_path: Path) -> None:
    without = attrs.evolve(CONTENTS, optimizer=False)
    on(2, save, str(tmp_path / "with"))
    on(2, save, str(tmp_path / "without"), without)

    def job(rank: int, world_size: int) -> None:
        checkpoint_directory.check(str(tmp_path / "with"), without, dist.group.WORLD)
        with pytest.raises(Refused, match="no optimizer state"):
            checkpoint_directory.check(str(tmp_path / "without"), CONTENTS, dist.group.WORLD)

    on(2, job)


def test_generators_go_on_from_their_states() -> None:
    device = torch.device("cpu")
    with torch.random.fork_rng():
        states = checkpoint_directory.rng_tensors(device, 5)
        first = torch.rand(3)
        checkpoint_directory.set_rng(states, device, 5)
        assert torch.equal(torch.rand(3), first)
