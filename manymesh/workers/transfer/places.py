"""Where the ends of a transfer run, as far as a link between them depends on it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import attrs
import torch

from core.errors import Refused
from core.transfer import TransferRound

# Variables that may differ: what is logged, and what a node's interfaces and files are called.
OF_A_NODE = (
    "NCCL_DEBUG",
    "NCCL_HOSTID",
    "NCCL_IB_HCA",
    "NCCL_SOCKET_IFNAME",
    "NCCL_CONF_FILE",
    "NCCL_TOPO_",
    "NCCL_GRAPH_",
)


@attrs.frozen
class Place:
    """What one end says of its process.

    Attributes:
        node: the machine, as its processes see it: what runs there can share memory.
        device: UUID of the end's CUDA device; "" on CPU.
        nccl: its variables NCCL_*, but those that differ between nodes.
    """

    node: str
    device: str = ""
    nccl: Mapping[str, str] = attrs.field(factory=dict)

    @classmethod
    def here(cls, device: torch.device) -> Place:
        """This process's, with its device of this transfer."""
        return cls(_node(), _uuid(device) if device.type == "cuda" else "", shared_nccl_variables(os.environ))


def shared_nccl_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables NCCL_* that must not differ between the ranks of a communicator."""
    names = (name for name in environment if name.startswith("NCCL_") and not name.startswith(OF_A_NODE))
    return {name: environment[name] for name in names}


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


def refuse_other_variables(places: Sequence[Place]) -> None:
    """NCCL never compares its settings, and hangs or crashes where they differ. Raises Refused, naming each variable
    that does, its values and who has them."""
    differences = []
    for name in sorted({name for place in places for name in place.nccl}):
        ends = _by(places, partial(_value, name))
        if len(ends) > 1:
            differences.append(f"{name} is " + ", ".join(f"{value} at {_names(who)}" for (value,), who in ends.items()))
    if differences:
        raise Refused(
            "the ends of the transfer 'collective' have different settings of NCCL, which would hang",
            have="; ".join(differences),
            want="the same variables NCCL_* at all ends",
            mend="give all groups the same in `env`; importing vLLM sets NCCL_CUMEM_ENABLE=0 where it is not set",
        )


def refuse_other_nodes(places: Sequence[Place]) -> None:
    """Only processes of one node share memory. Raises Refused, naming the ends that are on other nodes than the
    sender."""
    far = [index for index, place in enumerate(places) if place.node != places[0].node]
    if far:
        raise Refused(
            "the transfer 'ipc' connects ends on one node, in one container",
            have=f"{_names(far)} on other nodes than the sender",
            mend="choose kind 'collective', or 'object_store' where ends share GPUs",
        )


def end_name(index: int) -> str:
    """An end in words."""
    return f"receiver {index}" if index else "the sender"


def _by(places: Sequence[Place], key: Callable[[Place], tuple[str, ...]]) -> Mapping[tuple[str, ...], list[int]]:
    ends: dict[tuple[str, ...], list[int]] = {}
    for index, place in enumerate(places):
        ends.setdefault(key(place), []).append(index)
    return ends


def _value(name: str, place: Place) -> tuple[str]:
    return (repr(place.nccl[name]) if name in place.nccl else "not set",)


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
