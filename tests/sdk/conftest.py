"""Worlds of two and four ranks, started when a test asks for one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sdk.testing import RankPool

On = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def on() -> Iterator[On]:
    """`on(world_size, function, *args)`: the results of function(rank, world_size, *args) by rank."""
    pools: dict[int, RankPool] = {}

    def run(world_size: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        try:
            return pools[world_size].run(function, *args, **options)
        except RuntimeError:
            pools.pop(world_size).close()  # its ranks are ended; the next test gets new ones
            raise

    yield run
    for pool in pools.values():
        pool.close()
