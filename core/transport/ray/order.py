"""Which process gets which rank. Pure: the same whoever asks, whenever."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from core._run.transport import Identity


def rank_order(places: Sequence[Identity]) -> list[int]:
    """Indices of `places` in the order of their ranks: by node address as a number, node id, GPU, then as given.

    A resumed job so finds its ranks on the nodes and devices where they were before.
    """
    return sorted(range(len(places)), key=lambda i: (_node(places[i]), _gpu(places[i]), i))


def local_ranks(places: Sequence[Identity]) -> list[tuple[int, int]]:
    """For places in order of rank: (local rank, ranks on the same node)."""
    counts: dict[str, int] = {}
    numbers = []
    for place in places:
        numbers.append(counts.get(place.node_id, 0))
        counts[place.node_id] = numbers[-1] + 1
    return [(number, counts[place.node_id]) for number, place in zip(numbers, places, strict=True)]


def _node(place: Identity) -> tuple[int, int, str, str]:
    try:
        address = ipaddress.ip_address(place.node_address)
    except ValueError:  # a host name: after the addresses, by text
        return 9, 0, place.node_address, place.node_id
    return address.version, int(address), "", place.node_id


def _gpu(place: Identity) -> tuple[tuple[int, str], ...]:
    return tuple(map(by_number, place.gpu_ids))


def by_number(accelerator: str) -> tuple[int, str]:
    """Sorts ids of accelerators: numbers as such, others by text."""
    return (int(accelerator), "") if accelerator.isdigit() else (0, accelerator)
