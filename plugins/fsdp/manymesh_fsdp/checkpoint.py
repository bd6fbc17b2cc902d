"""Checkpoints by torch.distributed.checkpoint: written aside, renamed when whole, readable at any world size.

A checkpoint is a directory: DCP's files, and `manymesh.json`, which is written last and says what the rest is.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from core.errors import Refused
from sdk.parts.agreement import agree, on_first_rank

FORMAT = 1
MANIFEST = "manymesh.json"


@attrs.frozen
class Contents:
    """What a checkpoint holds besides tensors."""

    step: int
    schedule_step: int
    model_type: str
    world_size: int
    parameters: dict[str, list[int]]  # shapes by name
    optimizer: bool  # whether optimizer state is there
    files: dict[str, int] = attrs.field(factory=dict)  # bytes by name, so that a cut one is found before it is read
    engine: str = "fsdp"
    format: int = FORMAT


def save(path: str, tensors: dict[str, Any], contents: Contents, group: Any) -> None:
    """Collective: write `path`, replacing what is there only once the new one is whole.

    Raises:
        Refused: on all ranks, where any could not write. What was at `path` before is untouched.
    """
    final = Path(path).absolute()
    partial = final.with_name(final.name + ".partial")
    on_first_rank(group, lambda: _prepare(partial))
    try:
        _write_tensors(partial, tensors, group)
        on_first_rank(group, lambda: _finish(partial, final, contents))
    except Refused:
        on_first_rank(group, lambda: shutil.rmtree(partial, ignore_errors=True))
        raise


def check(path: str, wanted: Contents, group: Any) -> Contents:
    """Collective: what is at `path`, once it is known to be whole and of this model. Reads no tensor yet.

    Raises:
        Refused: on all ranks, where there is no checkpoint, it is damaged, or it is of another model.
    """
    return on_first_rank(group, lambda: _checked(Path(path).absolute(), wanted))


def read_tensors(path: str, tensors: dict[str, Any]) -> None:
    """Collective: fill the tensors in place, each rank its own shards."""
    dcp.load(tensors, checkpoint_id=path)


def _prepare(partial: Path) -> None:
    try:
        shutil.rmtree(partial, ignore_errors=True)  # what a killed run left
        partial.mkdir(parents=True)
    except OSError as error:
        raise _cannot_write(partial, error) from error


def _write_tensors(partial: Path, tensors: dict[str, Any], group: Any) -> None:
    error: Refused | None = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(partial, sync_files=True))
    except CheckpointException as failure:  # raised on all ranks, whoever failed
        rank, (cause, _) = min(failure.failures.items())
        error = _cannot_write(partial, cause, rank)
        error.__cause__ = failure
    except OSError as failure:  # on this rank alone
        error = _cannot_write(partial, failure, dist.get_rank(group))
    agree(group, error)


def _finish(partial: Path, final: Path, contents: Contents) -> None:
    """Write the manifest, make all of it durable, and give it its name."""
    older = final.with_name(final.name + ".older")
    try:
        files = {entry.name: entry.stat().st_size for entry in partial.iterdir()}
        with open(partial / MANIFEST, "w") as file:
            json.dump(attrs.asdict(attrs.evolve(contents, files=files)), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync_directory(partial)
        # A directory cannot be renamed onto one that holds files, so the older one steps aside for a moment.
        shutil.rmtree(older, ignore_errors=True)
        if final.exists():
            final.rename(older)
        try:
            partial.rename(final)
        except OSError:
            if older.exists():
                older.rename(final)
            raise
        _sync_directory(final.parent)
    except OSError as error:
        raise _cannot_write(partial, error) from error
    shutil.rmtree(older, ignore_errors=True)


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _cannot_write(partial: Path, cause: BaseException, rank: int = 0) -> Refused:
    reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
    return Refused(
        f"cannot write the checkpoint {str(partial)!r}: {reason}",
        have=f"{type(cause).__name__} on rank {rank}: {cause}",
        where=str(partial),
        mend="free space or choose another path, and save again; the engine and older checkpoints are untouched",
    )


def _checked(directory: Path, wanted: Contents) -> Contents:
    manifest, older = directory / MANIFEST, directory.with_name(directory.name + ".older")
    if not manifest.is_file():
        raise Refused(
            f"there is no checkpoint at {str(directory)!r}",
            have="a directory without manymesh.json" if directory.is_dir() else "no such directory",
            where=str(directory),
            mend=f"use {str(older)!r}, left by a save that was interrupted" if older.is_dir() else "",
        )
    try:
        data = json.loads(manifest.read_text())
        if data.get("format") != FORMAT or data.get("engine") != wanted.engine:
            raise Refused(
                "the checkpoint was written by another engine, or in another format",
                have=f"engine {data.get('engine')!r}, format {data.get('format')}",
                want=f"engine {wanted.engine!r}, format {FORMAT}",
                where=str(manifest),
            )
        have = Contents(**data)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise Refused("cannot read the checkpoint's manymesh.json", have=error, where=str(manifest)) from error
    _check_model(have, wanted, directory)
    for name, size in have.files.items():
        file = directory / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            raise Refused(
                "the checkpoint is damaged",
                have=f"{name}: " + ("missing" if found is None else f"{found} bytes"),
                want=f"{size} bytes",
                where=str(file),
                mend="load an older checkpoint",
            )
    return have


def _check_model(have: Contents, wanted: Contents, directory: Path) -> None:
    names = list(dict.fromkeys([*wanted.parameters, *have.parameters]))
    differing = [name for name in names if wanted.parameters.get(name) != have.parameters.get(name)]
    if differing or have.model_type != wanted.model_type:
        first = differing[:4]
        raise Refused(
            "the checkpoint is of another model",
            have={"model_type": have.model_type, **{name: have.parameters.get(name) for name in first}},
            want={"model_type": wanted.model_type, **{name: wanted.parameters.get(name) for name in first}},
            where=f"{directory}, {len(differing)} of {len(names)} parameters differ",
            mend="load it into an engine of the model that it was saved from",
        )
    if wanted.optimizer and not have.optimizer:
        raise Refused(
            "the checkpoint has no optimizer state, so training cannot go on from it",
            have="saved by an engine with trainable=False",
            where=str(directory),
        )


def rng_tensors(device: torch.device, rank: int) -> dict[str, torch.Tensor]:
    """This rank's generators' states, under names of its own."""
    states = {f"rng.{rank}.cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[f"rng.{rank}.device"] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_rng(tensors: dict[str, torch.Tensor], device: torch.device, rank: int) -> None:
    torch.set_rng_state(tensors[f"rng.{rank}.cpu"])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(tensors[f"rng.{rank}.device"], device)
