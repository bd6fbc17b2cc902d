"""The tensors of a checkpoint by torch.distributed.checkpoint, which reads them at any world size."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from manymesh.parts.checkpoint_directory import cannot_write


def write_tensors(directory: Path, tensors: dict[str, Any]) -> None:
    """Collective: each rank its own shards; of tensors that all ranks have under one name, one rank's.

    Raises:
        Refused, OSError: a rank could not write.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(directory, sync_files=True))
    except CheckpointException as failure:  # raised on all ranks, whoever failed
        rank, (cause, _) = min(failure.failures.items())
        raise cannot_write(directory, cause, rank) from failure


def read_tensors(path: str, tensors: dict[str, Any]) -> None:
    """Collective: fill the tensors in place, each rank its own shards."""
    dcp.load(tensors, checkpoint_id=path)
