"""Where the ends of a transfer run, as far as a link between them depends on it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs
import torch

from core.errors import Refused
from core.transfer import TransferRound


@attrs.frozen
class Place:
    """What one end says of its process.

    Attributes:
        node: the machine, as its processes see it: what runs there can share memory.
        device: UUID of the end's CUDA device; "" on CPU.
    """

    node: str
    device: str = ""

    @classmethod
    def here(cls, device: torch.device) -> Place:
        """This process's, with its device of this transfer."""
        return cls(_node(), _uuid(device) if device.type == "cuda" else "")


def gather(round_: TransferRound, index: int, num_receivers: int, place: Place) -> tuple[Place, ...]:
    """Every end says its place; gives all of them at the sender (index 0), and () at a receiver."""
    round_.put(f"place.{index}", json.dumps(attrs.asdict(place)))
    if index:
        return ()
    texts = (
        round_.get(f"place.{each}", f"{end_name(each)} of {num_receivers} to say where it runs")
        for each in range(num_receivers + 1)
    )
    return tuple(Place(**json.loads(text)) for text in texts)


def refuse_shared_devices(places: Sequence[Place]) -> None:
    """NCCL takes one rank a device. Raises Refused, naming the ends of the first device that has several."""
    for (_, device), ends in _by(places, lambda place: (place.node, place.device)).items():
        if device and len(ends) > 1:
            raise Refused(
                "the transfer 'collective' takes one end a GPU: NCCL has no two ranks on a device",
                have=f"{_names(ends)} on GPU {device}",
                mend="choose kind 'ipc', for ends on one node that share GPUs, or 'object_store', for any",
            )


def end_name(index: int) -> str:
    """An end in words."""
    return f"receiver {index}" if index else "the sender"


def _by(places: Sequence[Place], key: Callable[[Place], tuple[str, ...]]) -> Mapping[tuple[str, ...], list[int]]:
    ends: dict[tuple[str, ...], list[int]] = {}
    for index, place in enumerate(places):
        ends.setdefault(key(place), []).append(index)
    return ends


def _names(ends: Sequence[int]) -> str:
    more = f" and {len(ends) - 4} more" if len(ends) > 4 else ""
    return ", ".join(map(end_name, ends[:4])) + more


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _node() -> str:
    """Containers of one machine have names, and process numbers, of their own."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/pid")
    parts = [socket.gethostname()]
    parts += [boot.read_text().strip()] if boot.is_file() else []
    parts += [os.readlink(namespace)] if namespace.is_symlink() else []
    return " ".join(parts)
