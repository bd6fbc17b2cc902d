"""The base class of remote workers, and what a worker knows of its place. Needs no torch by itself."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self

import attrs

from core._rows.shards import Shard as Shard
from core.device import Accelerators, connect_store, join_world, local_variables
from core.errors import Refused, did_you_mean
from core.mesh import Mesh


@attrs.frozen
class WorkerContext:
    """A rank's place in its group, bound for life.

    Attributes:
        local_rank, local_world_size: its place among the group's ranks on the same node, and their number.
        accelerators: what it was given; None where it was given none, and where nobody deals them (in one process).
        master_addr, master_port: where rank 0 keeps the rendezvous store; port 0 in a group within one process.
        listener: rank 0's listening socket, opened before anybody was told its port, so that there is no race for it.
    """

    group: str = "alone"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    listener: socket.socket | None = attrs.field(default=None, repr=False, eq=False)
    accelerators: Accelerators | None = None

    def environment(self) -> dict[str, str]:
        """The variables that torch and the libraries built on it read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            **local_variables(self.local_rank, self.local_world_size, self.accelerators),
        }


_context: ContextVar[WorkerContext] = ContextVar("manymesh_worker_context")
_shard: ContextVar[Shard | None] = ContextVar("manymesh_shard", default=None)


@contextmanager
def placed(context: WorkerContext, shard: Shard | None = None) -> Iterator[None]:
    """Workers made inside take their place from `context`; a call inside sees `shard`."""
    tokens = _context.set(context), _shard.set(shard)
    try:
        yield
    finally:
        _context.reset(tokens[0])
        _shard.reset(tokens[1])


class Worker:
    """Base of the classes whose registered methods a group calls on every rank.

    A worker made by another worker (an inner worker) has the same place. It holds meshes under names: dispatch asks for
    them by name, so an outer worker re-exports those of its inner workers under names of its own.
    """

    context: WorkerContext
    meshes: dict[str, Mesh]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # Here and not in __init__, so that a subclass need not call ours.
        self = super().__new__(cls)
        self.context = _context.get(WorkerContext())
        self.meshes = {}
        return self

    @property
    def rank(self) -> int:
        return self.context.rank

    @property
    def world_size(self) -> int:
        return self.context.world_size

    @property
    def shard(self) -> Shard | None:
        """The rows of the call that is running, or None where it brought none."""
        return _shard.get()

    def add_mesh(self, name: str, mesh: Mesh, owner: str = "") -> None:
        """Let dispatch route by `mesh` under `name`.

        Raises:
            Refused: the name is taken.
        """
        if name in self.meshes:
            raise Refused(
                f"the worker already has a mesh named {name!r}",
                have=f"{self.meshes[name].layout} and, from {owner or 'this worker'}, {mesh.layout}",
                where=type(self).__name__,
                mend="export one of them under another name",
            )
        self.meshes[name] = mesh

    def export_mesh(self, name: str, inner: Worker, inner_name: str) -> None:
        """Re-export an inner worker's mesh under a name of this worker's own.

        Raises:
            Refused: the inner worker has no such mesh, or the name is taken.
        """
        self.add_mesh(name, inner.mesh(inner_name), owner=f"{type(inner).__name__}.{inner_name}")

    def mesh(self, name: str) -> Mesh:
        if name not in self.meshes:
            raise Refused(
                f"{type(self).__name__} has no mesh named {name!r}",
                have=sorted(self.meshes),
                mend=did_you_mean(name, self.meshes) if self.meshes else "initialise the worker first",
            )
        return self.meshes[name]

    def init_process_group(self, timeout_s: float = 1800.0) -> None:
        """Join the group's torch.distributed world (gloo on CPU, nccl on CUDA, both where both exist).

        Args:
            timeout_s: deadline of every collective.
        """
        import torch.distributed as dist

        place = self.context
        if dist.is_initialized():
            store: Any = None  # join_world checks that it is ours
        elif place.master_port == 0:
            if place.world_size != 1:
                raise Refused(
                    "ranks within one process cannot form a torch.distributed world",
                    have=f"world size {place.world_size}",
                    want="world size 1, or a group on Ray",
                )
            store = dist.HashStore()
        else:
            store = connect_store(
                place.master_addr, place.master_port, listener=place.listener, num_ranks=place.world_size
            )
        join_world(place.rank, place.world_size, store, timeout_s)

    def shutdown(self) -> None:
        """Free what the worker holds. Called once, when the group ends well."""
