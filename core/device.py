"""The one place that knows devices: which ones a rank was given, which collective backend serves them, and how ranks
meet."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import attrs

from core.errors import Refused

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

DEVICE_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}

Vendor = Literal["nvidia", "amd", "ascend"]
# The variables by which a process is shown some of a node's accelerators. Of several that are set the first counts.
SHOWN_BY: Mapping[Vendor, tuple[str, ...]] = {
    "nvidia": ("CUDA_VISIBLE_DEVICES",),
    "amd": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "ascend": ("ASCEND_RT_VISIBLE_DEVICES",),
}
# With these a process that begins sees none. HIP takes an empty variable for one that is not set.
HIDING = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1", "ASCEND_RT_VISIBLE_DEVICES": ""}


@attrs.frozen
class Accelerators:
    """The accelerators that a process was given, in the order in which it sees them.

    Attributes:
        ids: as the vendor, or Ray, names them on this node: numbers, UUIDs or MIG instances.
        ordinals: their numbers within the process: 2 is torch's "cuda:2".
        num_visible: how many the process sees, its own and others.
        are_shared: whether processes of other groups may be on them too.
    """

    ids: tuple[str, ...]
    ordinals: tuple[int, ...]
    num_visible: int
    are_shared: bool = False

    @classmethod
    def given(
        cls, ids: Iterable[str], vendor: Vendor, environment: Mapping[str, str], num_devices: int
    ) -> Accelerators:
        """Find what was given among what the process sees.

        Args:
            ids: in any order.
            environment: of the process.
            num_devices: how many the process sees, where no variable says it.

        Raises:
            Refused: the process doesn't see one of them.
        """
        shown = visible(vendor, environment)
        ordinals = {}
        for each in map(_entry, ids):
            if shown is None and each.isdigit():
                ordinals[each] = int(each)
            elif shown is not None and each in shown:
                ordinals[each] = shown.index(each)
            else:
                have = {name: environment[name] for name in SHOWN_BY[vendor] if name in environment}
                raise Refused(
                    f"this process was given accelerator {each!r} and doesn't see it",
                    have=", ".join(f"{name}={value}" for name, value in have.items()) or "no variable that shows it",
                    want=f"{each!r} among the visible ones",
                    mend=f"leave {' and '.join(SHOWN_BY[vendor])} to whoever starts the process",
                )
        found = sorted(ordinals, key=ordinals.__getitem__)
        num_visible = len(shown) if shown is not None else max(num_devices, *(ordinals[each] + 1 for each in found))
        return cls(tuple(found), tuple(ordinals[each] for each in found), num_visible)

    @classmethod
    def given_here(cls, ids: Iterable[str]) -> Accelerators:
        """The same, in this process. Raises Refused as `given`."""
        import torch

        vendor: Vendor = "ascend" if hasattr(torch, "npu") else "amd" if torch.version.hip else "nvidia"
        return cls.given(ids, vendor, os.environ, torch.cuda.device_count())


def local_variables(local_rank: int, local_world_size: int, given: Accelerators | None) -> dict[str, str]:
    """The environment variables that say a rank its place on its node, and its device.

    Libraries take LOCAL_RANK for the ordinal of the process's device, so it is that, and LOCAL_WORLD_SIZE is the number
    of devices that it counts in. The place is in RAY_LOCAL_RANK. On CPU they are the same.

    Args:
        local_rank, local_world_size: the place among the group's ranks on the node, and their number.
        given: None on CPU.
    """
    return {
        "LOCAL_RANK": str(given.ordinals[0] if given else local_rank),
        "LOCAL_WORLD_SIZE": str(given.num_visible if given else local_world_size),
        "RAY_LOCAL_RANK": str(local_rank),
        "RAY_LOCAL_WORLD_SIZE": str(local_world_size),
    }


def visible(vendor: Vendor, environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """The accelerators that variables show a process, in the order of their ordinals; None where no variable is set.

    As the vendors read them: the list ends at the first entry that is negative or empty, and shows nothing if it names
    one twice.
    """
    names = [
        name for name in SHOWN_BY[vendor] if environment.get(name, "") or (vendor != "amd" and name in environment)
    ]
    if not names:
        return None
    entries: list[str] = []
    for entry in map(_entry, environment[names[0]].split(",")):
        if not entry or entry.startswith("-") or entry == "NoDevFiles":
            break
        if entry in entries:
            return ()
        entries.append(entry)
    return tuple(entries)


def _entry(text: str) -> str:
    text = text.strip()
    return str(int(text)) if text.isdigit() else text


def choose_device(device: str | None = None) -> torch.device:
    """This rank's device: the one whose ordinal is in LOCAL_RANK, or the only one that the process sees.

    A worker group sets LOCAL_RANK to the ordinal of the device that the rank was given, and hides all devices from a
    rank that was given none. torchrun sets it too. Without it the rank takes the first.

    Args:
        device: "cpu", "cuda" or None for what the process sees.

    Raises:
        Refused: the device is unknown, or the process sees none of it, or too few.
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
    count = torch.cuda.device_count()
    index = int(os.environ.get("LOCAL_RANK", "0")) if count > 1 else 0
    if not 0 <= index < count:
        raise Refused(
            f"there is no device for LOCAL_RANK {index}",
            have=f"{count} visible devices",
            want=f"LOCAL_RANK from 0 to {count - 1}, the ordinal of the rank's device",
            mend="start no more processes on a node than it has devices, or show each process its own alone",
        )
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
    # Without device_id: with it torch (2.13) splits the world's communicator for each new group, also for gloo ones,
    # where only ranks outside of the group take part in the split. vLLM makes such groups, and would hang.
    dist.init_process_group(
        collective_backend(), store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )
