"""Buckets as safetensors files in a directory that all ends see."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from core.transfer import TransferRound
from manymesh.workers.transfer.buckets import offsets
from manymesh.workers.transfer.config import DiskConfig


class DiskTransfer:
    """A file appears under its name once it is whole, and is removed when all have loaded it.

    Nothing is synced to the medium: who reads it sees the same file system, and a crash makes the files worthless.
    """

    def __init__(self, config: DiskConfig, device: str | None = None) -> None:
        self._root = Path(config.directory).expanduser()
        self._directory: Path | None = None
        self._mine = False
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def connect(self, round_: TransferRound, index: int, num_receivers: int, host: str) -> None:
        if index == 0:
            self._mine, name = True, f"weights-{uuid.uuid4().hex}"
            self._directory = self._root / name
            self._directory.mkdir(parents=True)
            round_.put("directory", name)
        else:
            # The name alone: the directory may be mounted at another place here.
            name = round_.get("directory", "the sender's directory").decode()
            self._directory = self._root / name
            round_.wait_until(self._directory.is_dir, f"the sender's directory {name} to be seen in {self._root}")

    def send(self, round_: TransferRound, number: int, pieces: Sequence[torch.Tensor]) -> None:
        starts, size = offsets([len(piece) for piece in pieces])
        if len(self._buffer) < size:
            self._buffer = torch.empty(size, dtype=torch.uint8)
        flat = self._buffer[:size]
        for at, piece in zip(starts, pieces, strict=True):
            flat[at : at + len(piece)].copy_(piece)
        path = self._path(number)
        partial = path.with_suffix(".partial")
        save_file({"bucket": flat}, partial)
        os.replace(partial, path)
        round_.put(f"file.{number}")

    def receive(self, round_: TransferRound, number: int, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
        starts, _ = offsets(sizes)
        round_.get(f"file.{number}", f"the sender's bucket {number}")
        path = self._path(number)
        round_.wait_until(path.is_file, f"{path} to be seen")  # network file systems show it late
        flat = load_file(path)["bucket"]  # mapped, not read
        return [flat[at : at + each] for at, each in zip(starts, sizes, strict=True)]

    def free(self, number: int) -> None:
        self._path(number).unlink(missing_ok=True)

    def close(self) -> None:
        if self._mine and self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._directory, self._mine = None, False

    def _path(self, number: int) -> Path:
        assert self._directory is not None
        return self._directory / f"bucket-{number:05}.safetensors"
