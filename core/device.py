"""The one place that knows devices: which one a rank has, which collective backend serves it, and how ranks meet."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from core.errors import Refused

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

DEVICE_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def choose_device(device: str | None = None) -> torch.device:
    """This rank's device: the one whose number is in LOCAL_RANK.

    Args:
        device: "cpu", "cuda" or None for what the machine has.

    Raises:
        Refused: the device is unknown, or the machine has none of it.
    """
    import torch

    have_cuda = torch.cuda.is_available()
    kind = device or ("cuda" if have_cuda else "cpu")
    if kind not in DEVICE_BACKENDS:
        raise Refused(f"unknown device {kind!r}", want=sorted(DEVICE_BACKENDS))
    if kind == "cpu":
        return torch.device("cpu")
    if not have_cuda:
        raise Refused("this process sees no CUDA device", want="device 'cpu', or a pool with use_gpu=True")
    # Ray shows an actor only its own GPUs, so the number wraps around.
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def collective_backend() -> str:
    """`cpu:gloo,cuda:nccl` where both exist, so that CPU and GPU tensors both have collectives."""
    import torch

    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def open_listener(address: str) -> socket.socket:
    """Listen at an address of this machine, on a port of the system's choice, for `connect_store`: with the socket open
    before anybody is told its port, there is no race for it."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.bind((address, 0))
    listener.listen(1024)
    return listener


def connect_store(
    address: str,
    port: int,
    *,
    listener: socket.socket | None = None,
    num_ranks: int | None = None,
    timeout_s: float = 300.0,
) -> dist.TCPStore:
    """A connection to the key-value store at an address.

    Args:
        listener: of the process that serves the store: its socket at this address, which the store takes over.
        num_ranks: how many will connect; None where that is open.
        timeout_s: deadline of the connection, and of the store's own waits.
    """
    import torch.distributed as dist

    serving: dict[str, Any] = {} if listener is None else {"master_listen_fd": listener.detach()}
    return dist.TCPStore(
        address,
        port,
        num_ranks,
        is_master=listener is not None,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        **serving,
    )


def join_world(rank: int, world_size: int, store: Any, timeout_s: float) -> None:
    """`torch.distributed.init_process_group` over a ready store; a second call is a no-op."""
    import torch.distributed as dist

    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
            raise Refused(
                "this process already belongs to another torch.distributed world",
                have=f"rank {dist.get_rank()} of {dist.get_world_size()}",
                want=f"rank {rank} of {world_size}",
                mend="let the worker open its world before any library does",
            )
        return
    dist.init_process_group(
        collective_backend(), store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )
