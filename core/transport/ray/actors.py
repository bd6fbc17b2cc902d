"""The Ray transport: one actor a rank, each a WorkerHost."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import shlex
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import attrs
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from core._calls.call import Command, RankCall
from core._rows.stored import RowsToFetch, StoredPart
from core._rows.wire import encode
from core._run.host import WorkerHost, failed, run_coroutine
from core._run.observers import Observer
from core._run.transport import Identity, Outcome
from core.device import HIDING, Accelerators
from core.errors import DeadlineExceeded, Refused
from core.group import RayClassWithInitArgs
from core.transport.ray.backends import Parcel, packed, unpack
from core.transport.ray.order import by_number, local_ranks, rank_order
from core.transport.ray.pickles import Pickled, checked, pickled, unpickled
from core.transport.ray.pool import RayResourcePool, need_ray
from core.transport.ray.tickets import RayTicket, sent
from core.worker import WorkerContext


class RayHost(WorkerHost):
    """WorkerHost as an actor: it also says where it runs. Its methods give the bare value of an answer."""

    fetch = staticmethod(lambda handles: fetch(handles))

    def __init__(self) -> None:
        super().__init__()
        self._given = assigned(ray.get_runtime_context().get_accelerator_ids())
        if not self._given:  # Ray leaves such a process with all of the node's accelerators in sight
            os.environ.update(HIDING)

    def store(self, value: Any) -> Any:
        return ray.put(value)

    def run_pickled(self, method: str, parcel: Pickled | None, answer: bool) -> Any:
        call = self._unpacked(method, parcel)
        return sent(self.run(call[0], call[1], answer) if isinstance(call, tuple) else call)

    @staticmethod
    def _unpacked(method: str, parcel: Pickled | None) -> tuple[Command, RankCall] | Outcome:
        try:
            call: tuple[Command, RankCall] = unpickled(parcel) if parcel else (Command(method), RankCall())
        except Exception as error:  # a class or module that this process lacks
            return failed(error)
        return call

    def construct_from(
        self,
        build: tuple[type, Any, Any, tuple[Parcel, ...]],
        context: WorkerContext,
        observers: tuple[Observer, ...],
        are_shared: bool,
    ) -> Any:
        cls, args, kwargs, backends = build
        unpack(backends)
        if self._given:
            try:
                accelerators = attrs.evolve(Accelerators.given_here(self._given), are_shared=are_shared)
            except Refused as error:
                return sent(failed(error))
            context = attrs.evolve(context, accelerators=accelerators)
        return sent(self.construct(cls, args, kwargs, context, observers, set_env=True))

    def route_of(self, mesh: str) -> Any:
        return sent(self.route(mesh))

    def end(self) -> Any:
        return sent(self.shutdown())

    def cut(self, part: StoredPart, ranges: Sequence[tuple[int, int]], names: tuple[str, ...]) -> Any:
        return part.cut(ranges, names, fetch, self.store)

    def identify(self) -> Identity:
        context = ray.get_runtime_context()
        logs = []
        for descriptor in (1, 2):  # Ray has pointed them at this process's log files
            with suppress(OSError):
                logs.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        files = tuple(dict.fromkeys(log for log in logs if os.path.isfile(log)))
        return Identity(context.get_node_id(), ray.util.get_node_ip_address(), os.getpid(), self._given, files)


def assigned(by_resource: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The accelerators that Ray has given this process, in the order of their numbers.

    Args:
        by_resource: ids by Ray's name of the resource.
    """
    ids = by_resource.get("GPU") or by_resource.get("NPU") or ()
    return tuple(sorted(ids, key=by_number))


class LoopHost(RayHost):
    """RayHost on an event loop: Ray gives one to an actor whose class has a coroutine, and runs all methods on it."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0
        self._turns: dict[int, asyncio.Future[None]] = {}

    async def run_in_turn(self, method: str, parcel: Pickled | None, answer: bool, number: int) -> Any:
        """The same on an event loop, where Ray begins calls in any order: call `number` begins after number - 1."""
        if number != self._next:
            turn = self._turns[number] = asyncio.get_running_loop().create_future()
            await turn
        self._next = number + 1
        if following := self._turns.pop(self._next, None):
            following.set_result(None)  # resumes it when this call waits for something, or has ended
        call = self._unpacked(method, parcel)
        return sent(await run_coroutine(self, call[0], call[1], answer) if isinstance(call, tuple) else call)


def has_coroutines(methods: Mapping[str, Callable[..., Any]]) -> bool:
    """Whether actors of a worker with these methods have an event loop."""
    return any(map(inspect.iscoroutinefunction, methods.values()))


def host_class(methods: Mapping[str, Callable[..., Any]]) -> type[RayHost]:
    """RayHost with two actor methods for each method of the worker: `ask_x`, and `tell_x` where no answer is wanted.

    A call then needs no argument that says which: each costs some 70 microseconds for each rank. Where the worker has a
    coroutine method all of them are coroutines, and calls are numbered.
    """
    in_turn = has_coroutines(methods)

    def of(method: str, answer: bool) -> Callable[..., Any]:
        async def coroutine(self: LoopHost, parcel: Pickled | None, number: int) -> Any:
            return await self.run_in_turn(method, parcel, answer, number)

        def call(self: RayHost, parcel: Pickled | None = None) -> Any:
            return self.run_pickled(method, parcel, answer)

        return coroutine if in_turn else call

    calls = {f"{kind}_{name}": of(name, kind == "ask") for name in methods for kind in ("ask", "tell")}
    return type("RayHost", (LoopHost if in_turn else RayHost,), calls)


def fetch(handles: Sequence[Any]) -> list[Any]:
    """Values of Ray's store."""
    return ray.get(list(handles)) if handles else []


class RayTransport:
    """Actors on a pool, in order of rank.

    Args:
        methods: the worker's registered methods.
        env: environment variables of the actors' processes.
        python: their interpreter; None for the driver's.

    Raises:
        Refused: the pool cannot be placed.
        DeadlineExceeded: the actors' processes did not start in time.
    """

    store = "ray"

    def __init__(
        self,
        pool: RayResourcePool,
        group: str,
        methods: Mapping[str, Callable[..., Any]],
        env: Mapping[str, str],
        start_timeout_s: float,
        python: str | None = None,
    ) -> None:
        self.world_size, self._group = pool.world_size, group
        self._are_shared = pool.max_colocate_count > 1
        self._here = ray.get_runtime_context().get_node_id()
        self.ended = False
        # Of each rank's next call, where the actors have event loops.
        self._numbers = [0] * pool.world_size if has_coroutines(methods) else None
        placement_groups = pool.placement_groups()
        pool.let_in(self)  # not before there is room: a refused group is no tenant
        actor_class = ray.remote(host_class(methods))
        environment: dict[str, Any] = {"env_vars": dict(env)} if env else {}
        if python is not None:
            environment["py_executable"] = shlex.quote(python)  # Ray hands it to a shell
        self._actors: list[Any] = []
        self.identities: list[Identity] = []
        for placement_group in placement_groups:
            for bundle in range(placement_group.bundle_count):
                self._actors.append(
                    actor_class.options(
                        num_cpus=pool.cpus_per_process,
                        num_gpus=pool.num_gpus,
                        max_restarts=0,
                        runtime_env=environment or None,
                        scheduling_strategy=PlacementGroupSchedulingStrategy(
                            placement_group, placement_group_bundle_index=bundle
                        ),
                    ).remote()
                )
        try:
            identities = ray.get([actor.identify.remote() for actor in self._actors], timeout=start_timeout_s)
            order = rank_order(identities)
            self._actors = [self._actors[i] for i in order]
            self.identities = [identities[i] for i in order]
            nodes = {identity.node_id for identity in self.identities}
            self._address = "127.0.0.1" if len(nodes) == 1 else self.identities[0].node_address
            self._port: int = ray.get(self._actors[0].open_rendezvous.remote(self._address), timeout=start_timeout_s)
        except GetTimeoutError as error:
            self.end()
            raise DeadlineExceeded(
                f"the {self.world_size} processes of group {group!r} did not start within {start_timeout_s:g} s",
                where=f"pool {pool.name!r}",
                mend="look at the cluster with `ray status`, and whether its nodes have the driver's environment",
            ) from error
        except BaseException:
            self.end()
            raise

    def construct(self, build: RayClassWithInitArgs, observers: tuple[Observer, ...]) -> RayTicket:
        parts = build.cls, encode(build.args), encode(dict(build.kwargs)), packed()
        parcel = checked("__init__", lambda: ray.put(parts))
        references = {}
        for rank, (local_rank, local_size) in enumerate(local_ranks(self.identities)):
            context = WorkerContext(
                self._group, rank, self.world_size, local_rank, local_size, self._address, self._port
            )
            references[rank] = self._actors[rank].construct_from.remote(parcel, context, observers, self._are_shared)
        return RayTicket(references)

    def route(self, mesh: str) -> RayTicket:
        return RayTicket({rank: actor.route_of.remote(mesh) for rank, actor in enumerate(self._actors)})

    def run(self, command: Command, calls: Mapping[int, RankCall], answering: frozenset[int]) -> RayTicket:
        need_ray()
        parcels: dict[int, Any] = {}
        for call in calls.values():
            if id(call) not in parcels:
                nodes = {self.node(rank) for rank, other in calls.items() if other is call}
                # All are pickled before any is sent: a call that reached some ranks only would hang them.
                parcels[id(call)] = checked(command.method, functools.partial(_parcel, command, call, nodes))
        references = {}
        for rank, call in calls.items():
            parcel = parcels[id(call)]
            kind = "ask" if rank in answering else "tell"
            remote = getattr(self._actors[rank], f"{kind}_{command.method}")
            if self._numbers is not None:
                references[rank] = remote.remote(parcel, self._numbers[rank])
                self._numbers[rank] += 1
            else:
                references[rank] = remote.remote() if parcel is None else remote.remote(parcel)
        return RayTicket(references, running=True)

    def node(self, rank: int) -> str:
        return self.identities[rank].node_id

    def fetch(self, handles: Sequence[Any]) -> list[Any]:
        """Values that this transport's workers have stored."""
        return fetch(handles)

    def cut(self, part: StoredPart, ranges: Sequence[tuple[int, int]], names: tuple[str, ...]) -> Any:
        """Let the worker that made a part cut rows of it; a reference to the new part."""
        return self._actors[part.rank].cut.remote(part, ranges, names)

    def shutdown(self) -> RayTicket:
        if not ray.is_initialized():  # a call would start a new cluster
            return RayTicket({})
        return RayTicket({rank: actor.end.remote() for rank, actor in enumerate(self._actors)})

    def end(self) -> None:
        if self.ended:
            return
        self.ended = True
        if not ray.is_initialized():
            return
        for actor in self._actors:
            with suppress(RayError, ValueError):
                ray.kill(actor, no_restart=True)
        # Ray asks the process to go. One that sits in a collective on this node is not asked twice.
        mine = [identity.pid for identity in self.identities if identity.node_id == self._here]
        if not _gone_within(mine, 1.0):
            for pid in mine:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    def log_tail(self, rank: int, num_lines: int = 12) -> tuple[str, ...]:
        identity = self.identities[rank]
        if identity.node_id == self._here:
            return read_tail(identity.log_files, num_lines)
        there = NodeAffinitySchedulingStrategy(identity.node_id, soft=False)
        reader = ray.remote(read_tail).options(num_cpus=0, scheduling_strategy=there)
        try:
            lines: tuple[str, ...] = ray.get(reader.remote(identity.log_files, num_lines), timeout=2)
        except RayError:
            return ()
        return lines


def _parcel(command: Command, call: RankCall, nodes: set[str]) -> Any:
    """A call in the form that crosses, for ranks on these nodes; None for one of which all is said by its name."""

    def leaf(value: Any) -> Any:
        if isinstance(value, RowsToFetch):
            return _cut(value, nodes)
        if isinstance(value, ray.ObjectRef):
            raise Refused(
                f"an argument of {command.method!r} is a reference to an object in Ray's store",
                have=repr(value),
                want="its value, or the Future of another group's method",
                mend="give ray.get(reference), or what group.method.later(...) gives",
            )
        return value

    args, kwargs = encode(call.args, leaf), encode(dict(call.kwargs), leaf)
    bare = not args and not kwargs and call.shard is None and command == Command(command.method)
    return None if bare else pickled((command, RankCall(args, kwargs, call.shard)))


def _cut(rows: RowsToFetch, nodes: set[str]) -> RowsToFetch:
    """The rows with parts that lie on other nodes cut there: a node fetches whole objects."""
    source = rows.source

    def away(part: StoredPart, ranges: Sequence[tuple[int, int]], names: tuple[str, ...]) -> Any:
        whole = sum(stop - start for start, stop in ranges) >= part.num
        return None if whole or nodes == {source.node(part.rank)} else source.cut(part, ranges, names)

    return rows.cut_at(away)


def _gone_within(pids: Sequence[int], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while any(os.path.exists(f"/proc/{pid}") and not _is_zombie(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def read_tail(files: Sequence[str], num_lines: int) -> tuple[str, ...]:
    """The last lines of the files together, the newest file last; Ray's own markers are left out."""
    lines: list[str] = []
    for name in files:
        with suppress(OSError), open(name, errors="replace") as file:
            file.seek(max(0, os.path.getsize(name) - 16_384))
            lines += [line.rstrip() for line in file if line.strip() and not line.startswith(":")]
    return tuple(lines[-num_lines:])
