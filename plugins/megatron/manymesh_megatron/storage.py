"""Shards of whole tensors in the files of torch.distributed.checkpoint, from which any layout of ranks reads its own.

It is megatron's format torch_dist, and its dist_checkpointing reads the model from it (strict="log_unexpected", since
layers' extra state is not kept). Its writer is not used: that forks processes which write, and starts on each rank a
server process for their answers, which stays. A process that holds a device and its threads should not be forked, a
daemonic one may not be, and what it started outlives it when it is killed. A thread does as well: checksums and the
system's writes are done without Python's lock. Nor do ranks talk before they write: each plans its own part, and the
first learns at the end what there is.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from core.errors import Refused
from manymesh_megatron.tensor_shards import NAMING, TensorShard


@attrs.frozen(eq=False)
class WriteResult:
    """What a rank has written: the boxes, and where in its file each is."""

    items: list[WriteItem]
    places: list[Any]


def write_shards(directory: Path, shards: Sequence[TensorShard], rank: int) -> WriteResult:
    """Not collective: this rank's file.

    Raises:
        OSError: it cannot be written.
    """
    items = []
    for number, shard in enumerate(shards):
        properties = TensorProperties.create_from_tensor(shard.tensor)
        data = TensorWriteData(_chunk(shard), properties, torch.Size(shard.whole))
        index = MetadataIndex(shard.name, torch.Size(shard.offset), number)
        items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    writer = FileSystemWriter(directory, sync_files=True)
    # The writer names a rank's file after the place of its plan in such a list.
    plan = writer.prepare_global_plan([SavePlan(items)] * (rank + 1))[rank]
    try:
        return WriteResult(items, writer.write_data(plan, _Sources(shards)).wait())
    except RuntimeError as error:
        # Closing its archive, torch finds that less was written than it thought, and says only that.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise


def write_index(directory: Path, result: WriteResult, group: Any) -> None:
    """Collective, once all have written: the first rank writes what is where.

    Raises:
        OSError: on the first rank, where it cannot be written.
    """
    everyones: list[Any] | None = [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
    dist.gather_object((result.items, result.places), everyones, group=group, group_dst=0)
    if everyones is None:
        return
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    # This also checks that each whole tensor is there without gap or overlap.
    _, metadata = planner.create_global_plan([SavePlan(items) for items, _ in everyones])
    FileSystemWriter(directory, sync_files=True).finish(metadata, [places for _, places in everyones])
    # For megatron, which wants these two files beside the tensors.
    save_config(CheckpointingConfig("torch_dist", 1), str(directory))
    torch.save({"content_metadata": dict(NAMING)}, common := io.BytesIO())
    (directory / "common.pt").write_bytes(common.getvalue())


class Index:
    """What whole tensors a checkpoint has, and where.

    Raises:
        Refused: that cannot be read.
    """

    def __init__(self, path: str) -> None:
        self._path, self._reader = path, FileSystemReader(path)
        try:
            metadata = self._reader.read_metadata()
        except Exception as error:  # what unpickling a damaged file raises is anybody's guess
            raise _damaged(path, error) from error
        self._reader.set_up_storage_reader(metadata, is_coordinator=False)
        self.tensors: dict[str, Any] = metadata.state_dict_metadata

    def read(self, shards: Sequence[TensorShard]) -> list[torch.Tensor]:
        """Not collective: the shards' values, on CPU, in memory of their own.

        Raises:
            Refused: a shard is not there, whole, or cannot be read.
        """
        by_source: dict[str, list[int]] = {}
        for number, shard in enumerate(shards):
            source = next((each for each in shard.sources if each in self.tensors), None)
            if source is None or tuple(self.tensors[source].size) != shard.whole:
                have = None if source is None else tuple(self.tensors[source].size)
                raise _damaged(self._path, f"{shard.name}: {have}", shard.whole)
            by_source.setdefault(source, []).append(number)
        values = [torch.empty_like(shard.tensor, device="cpu") for shard in shards]
        targets = {source: [values[number] for number in numbers] for source, numbers in by_source.items()}
        items = []
        for source, numbers in by_source.items():
            chunks = [_chunk(shards[number]) for number in numbers]
            requests = create_read_items_for_chunk_list(source, self.tensors[source], chunks)
            if sum(prod(item.lengths) for item in requests) != sum(values[number].numel() for number in numbers):
                raise _damaged(self._path, f"{source}: with gaps")
            items += requests
        try:
            self._reader.read_data(LoadPlan(items), _Targets(targets)).wait()
        except Exception as error:  # torch says in many ways that bytes are not what they were
            raise _damaged(self._path, error) from error
        return values


class _Sources(DefaultSavePlanner):
    """Gives the writer what an item is of. Items are numbered as the shards."""

    def __init__(self, shards: Sequence[TensorShard]) -> None:
        super().__init__()
        self._shards = shards

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        number = write_item.index.index
        assert number is not None
        return self._shards[number].tensor


class _Targets(DefaultLoadPlanner):
    """Gives the reader what to fill: by source, the chunks that were asked for, in their order."""

    def __init__(self, tensors: dict[str, list[torch.Tensor]]) -> None:
        super().__init__()
        self._tensors = tensors

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._tensors[read_item.dest_index.fqn][read_item.dest_index.index]
        for dim, (first, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, first, length)
        return tensor


def _chunk(shard: TensorShard) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(shard.offset), shard.tensor.shape)


def _damaged(path: str, have: object, want: object = None) -> Refused:
    return Refused("the checkpoint is damaged", have=have, want=want, where=path, mend="load an older checkpoint")
