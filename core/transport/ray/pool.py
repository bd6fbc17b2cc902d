"""Resource pools: processes by node, placed as one Ray placement group a node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self
from weakref import WeakSet

import attrs
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from core.errors import Refused, did_you_mean


def need_ray() -> None:
    """Raises Refused when this process is not connected to a Ray cluster."""
    if not ray.is_initialized():
        raise Refused("this process is not connected to Ray", mend="call ray.init(...) first")


class RayResourcePool:
    """Room for the processes of worker groups.

    Args:
        process_on_nodes: number of processes on each node, e.g. [8, 8].
        use_gpu: give each process GPUs. None: where the cluster has GPUs.
        gpus_per_process: how many, all on its node.
        max_colocate_count: how many groups share a GPU; each of their processes gets 1/max_colocate_count of it.
        cpus_per_process: CPUs that Ray sets aside for a process of one group. None: 1, and with GPUs half of their
            share of a node's CPUs, from 1 to 8: what loads and converts a model needs threads.
        name: for errors.
        placement_timeout_s: how long to wait for room that other pools hold.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        *,
        use_gpu: bool | None = None,
        gpus_per_process: int = 1,
        max_colocate_count: int = 1,
        cpus_per_process: float | None = None,
        name: str = "pool",
        placement_timeout_s: float = 30.0,
    ) -> None:
        if not process_on_nodes or any(count < 1 for count in process_on_nodes) or max_colocate_count < 1:
            raise Refused(
                "a pool has at least one process on each of its nodes, and max_colocate_count is at least 1",
                have=f"process_on_nodes {list(process_on_nodes)}, max_colocate_count {max_colocate_count}",
                where=f"pool {name!r}",
            )
        if gpus_per_process < 1 or (gpus_per_process > 1 < max_colocate_count):
            raise Refused(
                "a process has whole GPUs, or a share of one",
                have=f"gpus_per_process {gpus_per_process}, max_colocate_count {max_colocate_count}",
                want="gpus_per_process at least 1; above 1 with max_colocate_count 1",
                where=f"pool {name!r}",
                mend="use a pool for each group: Ray cannot let two processes share the same several GPUs",
            )
        self.process_on_nodes, self.name = tuple(process_on_nodes), name
        self.use_gpu, self.max_colocate_count = use_gpu, max_colocate_count
        self.gpus_per_process, self._cpus, self._timeout_s = gpus_per_process, cpus_per_process, placement_timeout_s
        self._groups: list[PlacementGroup] | None = None
        self._tenants: WeakSet[Any] = WeakSet()

    @property
    def world_size(self) -> int:
        """Number of processes of a group that fills the pool."""
        return sum(self.process_on_nodes)

    @property
    def num_gpus(self) -> float:
        """What Ray gives a process of one group."""
        return self.gpus_per_process / self.max_colocate_count if self._with_gpu() else 0

    @property
    def cpus_per_process(self) -> float:
        if self._cpus is None:
            need_ray()
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            self._cpus = cpus_beside(self.num_gpus, nodes)
        return self._cpus

    def placement_groups(self) -> list[PlacementGroup]:
        """One placement group a node, placed.

        Raises:
            Refused: the cluster is too small, or other pools hold the room and don't give it back in time.
        """
        need_ray()
        if self._groups is None:
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            self._check_fits(nodes)
            groups = [
                placement_group([self._bundle()] * count, strategy="STRICT_PACK") for count in self.process_on_nodes
            ]
            if not all(group.wait(self._timeout_s) for group in groups):
                free = ray.available_resources()
                for group in groups:
                    remove_placement_group(group)
                raise Refused(
                    f"pool {self.name!r} found no room within {self._timeout_s:g} s",
                    have=", ".join(f"{key} {free.get(key, 0):g} free" for key in self._bundle()),
                    want=self._needs(),
                    where=f"pool {self.name!r}, processes by node {list(self.process_on_nodes)}",
                    mend="shut down another pool, or make this one smaller",
                )
            self._groups = groups
        return self._groups

    def let_in(self, tenant: Any) -> None:
        """Count a group's transport that is going to fill the pool; it leaves when its `ended` is true.

        Raises:
            Refused: max_colocate_count groups are in it already.
        """
        inside = sum(not each.ended for each in self._tenants)
        if inside >= self.max_colocate_count:
            raise Refused(
                f"pool {self.name!r} is full",
                have=f"{inside} group(s)",
                want=f"at most max_colocate_count, {self.max_colocate_count}",
                mend="shut down a group, use another pool, or raise max_colocate_count",
            )
        self._tenants.add(tenant)

    def shutdown(self) -> None:
        """Give the room back. Can be called twice."""
        if not ray.is_initialized():
            self._groups = None
        for group in self._groups or ():
            remove_placement_group(group)
        self._groups = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _with_gpu(self) -> bool:
        if self.use_gpu is None:
            need_ray()
            self.use_gpu = ray.cluster_resources().get("GPU", 0) > 0
        return self.use_gpu

    def _bundle(self) -> dict[str, float]:
        bundle = {"CPU": self.cpus_per_process * self.max_colocate_count}
        return bundle | {"GPU": float(self.gpus_per_process)} if self._with_gpu() else bundle

    def _needs(self) -> str:
        return ", ".join(f"{key} {value * self.world_size:g}" for key, value in self._bundle().items())

    def _check_fits(self, nodes: Sequence[Mapping[str, float]]) -> None:
        where = f"pool {self.name!r}, processes by node {list(self.process_on_nodes)}"
        mend = "make the pool smaller, lower max_colocate_count, cpus_per_process or gpus_per_process, or add nodes"
        if self.use_gpu and not any(node.get("GPU") for node in nodes):
            mend = "set use_gpu=False, or connect to a cluster with GPUs"
        for key, value in self._bundle().items():
            need, supply = value * self.world_size, sum(node.get(key, 0) for node in nodes)
            if need > supply:
                raise Refused(
                    f"pool {self.name!r} cannot be placed: {key} needs {need:g}, has {supply:g}",
                    have=f"{supply:g} {key} on {len(nodes)} node(s)",
                    want=f"{value:g} {key} for each of {self.world_size} processes",
                    where=where,
                    mend=mend,
                )
        room = [dict(node) for node in nodes]
        for count in sorted(self.process_on_nodes, reverse=True):
            want = {key: value * count for key, value in self._bundle().items()}
            host = next((r for r in room if all(r.get(k, 0) >= v for k, v in want.items())), None)
            if host is None:
                raise Refused(
                    f"pool {self.name!r} cannot be placed: no node has room for {count} of its processes",
                    have=[{key: node.get(key, 0) for key in want} for node in nodes],
                    want=want,
                    where=where,
                    mend=mend,
                )
            for key, value in want.items():
                host[key] -= value


def cpus_beside(num_gpus: float, nodes: Sequence[Mapping[str, float]]) -> float:
    """CPUs for a process with so many GPUs: half of their share of the node that has the fewest, from 1 to 8; 1 for a
    process without GPUs. Half, so that there is room for what has no GPU."""
    shares = [node.get("CPU", 0) / node["GPU"] * num_gpus for node in nodes if node.get("GPU")]
    return min(8, max(1, min(shares) // 2)) if shares and num_gpus else 1


@attrs.define
class ResourcePoolManager:
    """Pools by name, and the pool of each role.

    Args:
        resource_pool_spec: processes by node, by pool name: {"global": [8, 8], "reward": [4]}.
        mapping: pool name by role.
        pool_options: further arguments of every RayResourcePool.
    """

    resource_pool_spec: Mapping[str, Sequence[int]]
    mapping: Mapping[str, str]
    pool_options: Mapping[str, Any] = attrs.field(factory=dict)
    _pools: dict[str, RayResourcePool] = attrs.field(factory=dict, init=False)

    def create_resource_pool(self) -> dict[str, RayResourcePool]:
        """Make and place all pools.

        Raises:
            Refused: a role names no pool, or a pool cannot be placed; then none stays placed.
        """
        for role, pool in self.mapping.items():
            if pool not in self.resource_pool_spec:
                raise Refused(
                    f"role {role!r} is mapped to pool {pool!r}, which there is not",
                    mend=did_you_mean(pool, self.resource_pool_spec),
                )
        try:
            for name, counts in self.resource_pool_spec.items():
                if name not in self._pools:
                    self._pools[name] = RayResourcePool(counts, name=name, **self.pool_options)
                    self._pools[name].placement_groups()
        except Refused:
            self.shutdown()
            raise
        return dict(self._pools)

    def get_resource_pool(self, role: str) -> RayResourcePool:
        """The pool of a role. Raises Refused when the role is not mapped."""
        if role not in self.mapping:
            raise Refused(f"no pool is mapped to role {role!r}", mend=did_you_mean(role, self.mapping))
        self.create_resource_pool()
        return self._pools[self.mapping[role]]

    def shutdown(self) -> None:
        for pool in self._pools.values():
            pool.shutdown()
        self._pools.clear()
