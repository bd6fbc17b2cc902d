"""Buckets in memory that the ends on one node share: of a GPU, by torch's CUDA IPC, or of the host."""

from __future__ import annotations

import base64
import json
import mmap
import os
import uuid
from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from core.device import choose_device
from core.errors import Refused
from core.transfer import TransferRound
from manymesh.workers.transfer.buckets import offsets
from manymesh.workers.transfer.config import IpcConfig
from manymesh.workers.transfer.places import Place, end_name, gather, refuse_other_nodes

_PROBE = 42


class IpcTransfer:
    """Two flat buffers of the sender take turns; a receiver opens each once, by its handle in the store.

    They are on the GPU where all ends have the same one, else in the host's memory, in files without a name: the kernel
    frees them with the last process that has them open, however it ends.
    """

    def __init__(self, config: IpcConfig, device: str | None = None) -> None:
        self._device = choose_device(device)
        self._index = self._num_receivers = 0
        self._memory_device = torch.device("cpu")
        self._shared: dict[int, SharedMemory] = {}  # the sender's, by bucket modulo 2
        self._opened: dict[int, tuple[str, torch.Tensor]] = {}  # a receiver's, with their names

    def connect(self, round_: TransferRound, index: int, num_receivers: int, host: str) -> None:
        """Raises Refused where an end runs on another node, or cannot open the sender's memory."""
        self._index, self._num_receivers = index, num_receivers
        places = gather(round_, index, num_receivers, Place.here(self._device))
        if index == 0:
            refuse_other_nodes(places)
            if len({place.device for place in places}) == 1:
                self._memory_device = self._device
            probe = SharedMemory(1, self._memory_device, num_receivers)
            probe.data.fill_(_PROBE)
            self._finish_writing()
            round_.put("probe", probe.handle)
        else:
            self._try_to_open(round_.get("probe", "the sender to share memory").decode())
        round_.meet("opened", num_receivers + 1, "all receivers to open the sender's memory")

    def send(self, round_: TransferRound, number: int, pieces: Sequence[torch.Tensor]) -> None:
        starts, size = offsets([len(piece) for piece in pieces])
        memory = self._shared.get(number % 2)
        if memory is None or len(memory.data) < size:
            memory = self._shared[number % 2] = SharedMemory(size, self._memory_device, self._num_receivers)
        for at, piece in zip(starts, pieces, strict=True):
            memory.data[at : at + len(piece)].copy_(piece)
        self._finish_writing()
        round_.put(f"bucket.{number}", memory.handle)

    def receive(self, round_: TransferRound, number: int, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
        starts, size = offsets(sizes)
        handle = json.loads(round_.get(f"bucket.{number}", f"the sender's bucket {number}"))
        name, flat = self._opened.get(number % 2, ("", torch.empty(0)))
        if name != handle["name"]:
            flat = open_shared(handle, self._index, self._device)
            self._opened[number % 2] = handle["name"], flat
        flat = flat[:size]
        if self._device.type == "cuda":
            # The sender writes to its memory again when the load was launched, not when the GPU has done it.
            flat = flat.to(self._device, copy=True)
            torch.cuda.current_stream(self._device).synchronize()
        return [flat[at : at + each] for at, each in zip(starts, sizes, strict=True)]

    def free(self, number: int) -> None:
        """The buffer is used again."""

    def close(self) -> None:
        self._shared.clear()
        self._opened.clear()
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()

    def _finish_writing(self) -> None:
        if self._memory_device.type == "cuda":
            torch.cuda.current_stream(self._memory_device).synchronize()

    def _try_to_open(self, handle: str) -> None:
        try:
            found: Any = int(open_shared(json.loads(handle), self._index, self._device)[0])
        except (OSError, RuntimeError) as error:
            found = f"{type(error).__name__}: {error}"
        if found != _PROBE:
            raise Refused(
                "an end of the transfer 'ipc' cannot open the sender's memory",
                have=f"{end_name(self._index)}: {found}",
                want="ends of one user, in one container",
                mend="choose kind 'object_store', or 'collective' where no two ends share a GPU",
            )


class SharedMemory:
    """Memory of this process that others on the node can open while it exists.

    Args:
        size: bytes, above 0.
        num_receivers: how many may open it.

    Attributes:
        data: flat uint8.
        handle: for open_shared, as JSON.
    """

    def __init__(self, size: int, device: torch.device, num_receivers: int) -> None:
        self._file: int | None = None
        handle: dict[str, Any] = {"name": uuid.uuid4().hex, "size": size}
        if device.type == "cuda":
            self.data = torch.empty(size, dtype=torch.uint8, device=device)
            # torch counts who has it open by handle, so that each receiver has its own.
            handle["cuda"] = [_cuda_handle(self.data) for _ in range(num_receivers)]
        else:
            self._file = os.memfd_create("manymesh-weights")
            os.ftruncate(self._file, size)
            self.data = torch.frombuffer(mmap.mmap(self._file, size), dtype=torch.uint8)
            handle["file"] = f"/proc/{os.getpid()}/fd/{self._file}"
        self.handle = json.dumps(handle)

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)


def open_shared(handle: dict[str, Any], index: int, device: torch.device) -> torch.Tensor:
    """The memory of a SharedMemory, flat uint8, for receiver `index`. Raises OSError or RuntimeError."""
    size = handle["size"]
    if "cuda" in handle:
        return _opened_on_cuda(size, handle["cuda"][index - 1], device)
    file = os.open(handle["file"], os.O_RDWR)
    try:
        return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
    finally:
        os.close(file)


def _cuda_handle(data: torch.Tensor) -> list[Any]:
    """What torch passes to another process for a flat tensor, but types and shapes, which both know, and the device,
    which each numbers in its own way."""
    _, args = reduce_tensor(data)
    memory, num_bytes, offset, _, counter, counter_offset, event, wait = args[7:]
    return [_text(value) for value in (memory, num_bytes, offset, counter, counter_offset, event, wait)]


def _opened_on_cuda(size: int, handle: Sequence[Any], device: torch.device) -> torch.Tensor:
    memory, num_bytes, offset, counter, counter_offset, event, wait = map(_value, handle)
    shape = (torch.Tensor, torch.Size([size]), (1,), 0, torch.storage.TypedStorage, torch.uint8)
    opened: torch.Tensor = rebuild_cuda_tensor(
        *shape, device.index, memory, num_bytes, offset, False, counter, counter_offset, event, wait
    )
    return opened


def _text(value: Any) -> Any:
    return {"bytes": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _value(value: Any) -> Any:
    return base64.b64decode(value["bytes"]) if isinstance(value, dict) else value
