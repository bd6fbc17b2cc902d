"""What a call takes of memory: a shard that several ranks share is in the store once, and nothing piles up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import ray
import torch
from tensordict import TensorDict

from core.group import RayClassWithInitArgs
from tests.support.workers import Echo

MB = 1 << 20


@contextmanager
def group_of(dp_size: int) -> Iterator[Any]:
    """dp_size x tp 2 ranks."""
    from core.transport.ray import RayResourcePool, RayWorkerGroup

    worker = RayClassWithInitArgs(Echo, [rank // 2 for rank in range(2 * dp_size)], list(range(0, 2 * dp_size, 2)))
    with RayResourcePool([2 * dp_size], cpus_per_process=0.5) as pool, RayWorkerGroup(pool, worker) as group:
        yield group


def store_bytes() -> int:
    """Bytes of objects in the node's store."""
    from ray._private.internal_api import node_stats

    (node,) = ray.nodes()
    return int(node_stats(node["NodeManagerAddress"], node["NodeManagerPort"]).store_stats.object_store_bytes_used)


def own_bytes() -> int:
    """Memory of this process that is its own, so without the store's."""
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("RssAnon"))


def check(dp_size: int, num_bytes: int) -> None:
    batch = TensorDict({"x": torch.rand(64, num_bytes // 4 // 64)}, batch_size=[64])
    with group_of(dp_size) as group:
        assert group.hold(batch[:dp_size], 0).result() == [1] * dp_size
        before = store_bytes()
        future = group.hold(batch, 1.0)
        assert 0.9 * num_bytes < store_bytes() - before < 1.1 * num_bytes
        assert future.result() == [64 // dp_size] * dp_size
        for calls in (3, 20):
            before = own_bytes()
            for _ in range(calls):
                assert torch.equal(group.echo(batch)["x"], batch["x"])
        assert own_bytes() < 1.05 * before


@pytest.mark.ci
def test_ranks_that_share_a_shard_share_its_memory_and_the_drivers_does_not_grow(ray_cluster: None) -> None:
    check(2, 48 * MB)  # malloc gives what is above 32 MB back at once


@pytest.mark.slow
def test_256_mb_over_dp_4_on_8_ranks(ray_cluster: None) -> None:
    check(4, 256 * MB)
