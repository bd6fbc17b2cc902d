"""Buckets by broadcast, over a process group of the sender and all receivers."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from core.device import DEVICE_BACKENDS, choose_device
from core.transfer import TransferRound
from manymesh.workers.transfer.buckets import offsets
from manymesh.workers.transfer.config import CollectiveConfig
from manymesh.workers.transfer.places import Place, gather, refuse_other_variables, refuse_shared_devices


class CollectiveTransfer:
    """Rank 0 of the group is the sender.

    The group is made directly from its backend, beside torch.distributed's registry: a process has one default world,
    and both the trainer's and the rollout's stay as they are. A broadcast is a tree, so that the sender's share of the
    work grows with the logarithm of the receivers.

    Two flat buffers on each side take turns. Pieces are copied into the sender's and are views of the receiver's.
    """

    def __init__(self, config: CollectiveConfig, device: str | None = None) -> None:
        self._device = choose_device(device)
        self._backend: Any = None
        self._work: Any = None  # the last broadcast
        self._buffers: dict[int, torch.Tensor] = {}

    def connect(self, round_: TransferRound, index: int, num_receivers: int, host: str) -> None:
        """Raises Refused, at the sender, where NCCL cannot connect the ends."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            places = gather(round_, index, num_receivers, Place.here(self._device))
            refuse_shared_devices(places)
            refuse_other_variables(places)
        # All must be there first: the backend's constructor doesn't hear of a stop.
        num_ends = num_receivers + 1
        round_.meet("group", num_ends, "all ends to join the process group")
        self._backend = _backend(self._device, round_.store, index, num_ends, host, round_.timeout_s)

    def send(self, round_: TransferRound, number: int, pieces: Sequence[torch.Tensor]) -> None:
        starts, size = offsets([len(piece) for piece in pieces])
        buffer = self._buffer(number, size)
        for at, piece in zip(starts, pieces, strict=True):
            buffer[at : at + len(piece)].copy_(piece)
        self._broadcast(round_, buffer, number)

    def receive(self, round_: TransferRound, number: int, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
        starts, size = offsets(sizes)
        buffer = self._buffer(number, size)
        self._broadcast(round_, buffer, number)
        return [buffer[at : at + each] for at, each in zip(starts, sizes, strict=True)]

    def free(self, number: int) -> None:
        """The buffer is used again."""

    def close(self) -> None:
        resources, self._backend, self._work = [self._backend, self._work], None, None
        if resources[0] is not None and self._device.type == "cuda":
            resources[0].abort()
        elif resources[1] is not None and not resources[1].is_completed():
            # gloo cannot abort a broadcast: it runs until its deadline. Its destructor would wait for that with
            # Python's lock held, so the group is kept until then.
            threading.Thread(target=_let_go_when_done, args=(resources,), daemon=True).start()

    def _buffer(self, number: int, size: int) -> torch.Tensor:
        buffer = self._buffers.get(number % 2)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[number % 2] = torch.empty(size, dtype=torch.uint8, device=self._device)
        return buffer[:size]

    def _broadcast(self, round_: TransferRound, buffer: torch.Tensor, number: int) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # of this thread
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        work = self._work = self._backend.broadcast([buffer], options)

        def pause(seconds: float) -> None:
            with suppress(RuntimeError):  # its time is over; what else went wrong the last wait raises again
                work.wait(timedelta(seconds=max(seconds, 0.001)))

        what = f"the broadcast of bucket {number}"
        if self._device.type == "cuda":  # its wait is for the stream, not for the host
            round_.wait_until(work.is_completed, what)
        else:
            round_.wait_until(work.is_completed, what, pause)
        work.wait()


def _backend(device: torch.device, store: Any, rank: int, size: int, host: str, timeout_s: float) -> Any:
    # Longer than our own deadline, which comes first and says what was waited for.
    timeout = timedelta(seconds=timeout_s + 10)
    if DEVICE_BACKENDS[device.type] == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=host)]
    options._threads = 2
    return gloo(store, rank, size, options)


def _let_go_when_done(resources: list[Any]) -> None:
    while not resources[1].is_completed():
        time.sleep(0.2)
    resources.clear()
