"""A checkpoint's directory: written aside, given its name when whole, and known to be whole before it is read.

An engine's own files, in folders if it likes, and `manymesh.json`, which is written last and says what the rest is.
`save` is all of it. An engine that writes while it trains takes the steps by themselves:

    partial = prepare(path, group)        # then start writing into it
    write(partial, job, group)            # e.g. wait for the writer: every rank's part is there, or Refused
    finish(partial, contents, group)      # or discard(partial, group)
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

from core.errors import Refused
from manymesh.parts.agreement import agree, on_first_rank

FORMAT = 1
MANIFEST = "manymesh.json"
PARTIAL = ".partial"


@attrs.frozen
class Contents:
    """What a checkpoint holds besides tensors. Only the first rank's is read."""

    engine: str  # its name in the manifest: engines don't read each other's files
    step: int
    schedule_step: int
    model_type: str
    world_size: int
    parameters: dict[str, list[int]]  # whole shapes by name
    optimizer: bool  # whether optimizer state is there
    files: dict[str, int] = attrs.field(factory=dict)  # bytes by relative path, so that a cut one is found in time
    format: int = FORMAT


def save(
    path: str, contents: Contents, job: Callable[[Path], None], group: Any, failures: tuple[type[Exception], ...] = ()
) -> None:
    """Collective: write `path`, replacing what is there only once the new one is whole.

    Args:
        job, failures: see write.

    Raises:
        Refused: on all ranks, where any could not write. What was at `path` before is untouched.
    """
    partial = prepare(path, group)
    try:
        write(partial, job, group, failures)
        finish(partial, contents, group)
    except Refused:
        discard(partial, group)
        raise


def prepare(path: str, group: Any) -> Path:
    """Collective: make the empty directory beside `path` that is written to.

    Raises:
        Refused: on all ranks, where it cannot be made.
    """
    final = Path(path).absolute()
    partial = final.with_name(final.name + PARTIAL)
    on_first_rank(group, lambda: _make_empty(partial))
    return partial


def write(partial: Path, job: Callable[[Path], None], group: Any, failures: tuple[type[Exception], ...] = ()) -> None:
    """Collective: run `job(partial)` on every rank. A rank must come back from it although another's failed.

    Args:
        failures: what `job` may raise besides OSError and Refused where it cannot write, such as a library's own
            errors. Anything else is a fault of the program, and goes through on its rank.

    Raises:
        Refused: on all ranks, the error of the lowest rank that has one.
    """
    error: Refused | None = None
    expected: tuple[type[Exception], ...] = (OSError, *failures)
    try:
        job(partial)
    except Refused as refusal:
        error = refusal
    except expected as failure:
        error = cannot_write(partial, failure, dist.get_rank(group))
        error.__cause__ = failure
    agree(group, error)


def finish(partial: Path, contents: Contents, group: Any) -> None:
    """Collective, once every rank has written: write the manifest, make all durable, and give it its name.

    Raises:
        Refused: on all ranks, where that failed. What was there before is untouched.
    """
    on_first_rank(group, lambda: _finish(partial, contents))


def discard(partial: Path, group: Any) -> None:
    """Collective: remove what was written."""
    on_first_rank(group, lambda: shutil.rmtree(partial, ignore_errors=True))


def check(path: str, expected: Contents, group: Any) -> Contents:
    """Collective: what is at `path`, once it is known to be whole and of this engine and model. Reads no tensor yet.

    Args:
        expected: what the engine would save now.

    Raises:
        Refused: on all ranks, where there is no checkpoint, it is damaged, it is of another engine or model, or it has
            no optimizer state and the engine wants it.
    """
    return on_first_rank(group, lambda: _checked(Path(path).absolute(), expected))


def cannot_write(partial: Path, cause: BaseException, rank: int) -> Refused:
    """For a job that knows better than `write` which rank failed, and why."""
    reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
    return Refused(
        f"cannot write the checkpoint {str(partial)!r}: {reason}",
        have=f"{type(cause).__name__} on rank {rank}: {cause}",
        where=str(partial),
        mend="free space or choose another path, and save again; the engine and older checkpoints are untouched",
    )


def rng_tensors(device: torch.device, rank: int) -> dict[str, torch.Tensor]:
    """This rank's generators' states, under names of its own."""
    states = {f"rng.{rank}.cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[f"rng.{rank}.device"] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_rng(tensors: dict[str, torch.Tensor], device: torch.device, rank: int) -> None:
    """Put back what rng_tensors gave."""
    torch.set_rng_state(tensors[f"rng.{rank}.cpu"])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(tensors[f"rng.{rank}.device"], device)


def _make_empty(partial: Path) -> None:
    try:
        shutil.rmtree(partial, ignore_errors=True)  # what a killed run left
        partial.mkdir(parents=True)
    except OSError as error:
        raise cannot_write(partial, error, 0) from error


def _finish(partial: Path, contents: Contents) -> None:
    final = partial.with_name(partial.name.removesuffix(PARTIAL))
    older = _older(final)
    try:
        inside = sorted(partial.rglob("*"))
        files = {each.relative_to(partial).as_posix(): each.stat().st_size for each in inside if each.is_file()}
        manifest = partial / MANIFEST
        manifest.write_text(json.dumps(attrs.asdict(attrs.evolve(contents, files=files)), indent=1))
        for each in (*inside, manifest, partial):
            _sync(each)
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
        _sync(final.parent)
    except OSError as error:
        raise cannot_write(partial, error, 0) from error
    shutil.rmtree(older, ignore_errors=True)


def _older(final: Path) -> Path:
    return final.with_name(final.name + ".older")


def _sync(path: Path) -> None:
    """Make a file's bytes, or a directory's names, outlive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _checked(directory: Path, expected: Contents) -> Contents:
    manifest, older = directory / MANIFEST, _older(directory)
    if not manifest.is_file():
        raise Refused(
            f"there is no checkpoint at {str(directory)!r}",
            have="a directory without manymesh.json" if directory.is_dir() else "no such directory",
            where=str(directory),
            mend=f"use {str(older)!r}, left by a save that was interrupted" if older.is_dir() else "",
        )
    try:
        data = json.loads(manifest.read_text())
        if data.get("format") != FORMAT or data.get("engine") != expected.engine:
            raise Refused(
                "the checkpoint was written by another engine, or in another format",
                have=f"engine {data.get('engine')!r}, format {data.get('format')}",
                want=f"engine {expected.engine!r}, format {FORMAT}",
                where=str(manifest),
            )
        have = Contents(**data)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise Refused("cannot read the checkpoint's manymesh.json", have=error, where=str(manifest)) from error
    _check_model(have, expected, directory)
    for name, size in have.files.items():
        file = directory / name
        num_bytes = file.stat().st_size if file.is_file() else None
        if num_bytes != size:
            raise Refused(
                "the checkpoint is damaged",
                have=f"{name}: " + ("missing" if num_bytes is None else f"{num_bytes} bytes"),
                want=f"{size} bytes",
                where=str(file),
                mend="load an older checkpoint",
            )
    return have


def _check_model(have: Contents, expected: Contents, directory: Path) -> None:
    names = list(dict.fromkeys([*expected.parameters, *have.parameters]))
    differing = [name for name in names if expected.parameters.get(name) != have.parameters.get(name)]
    if differing or have.model_type != expected.model_type:
        first = differing[:4]
        raise Refused(
            "the checkpoint is of another model",
            have={"model_type": have.model_type, **{name: have.parameters.get(name) for name in first}},
            want={"model_type": expected.model_type, **{name: expected.parameters.get(name) for name in first}},
            where=f"{directory}, {len(differing)} of {len(names)} parameters differ",
            mend="load it into an engine of the model that it was saved from",
        )
    if expected.optimizer and not have.optimizer:
        raise Refused(
            "the checkpoint has no optimizer state, so training cannot go on from it",
            have="saved by an engine with trainable=False",
            where=str(directory),
        )
