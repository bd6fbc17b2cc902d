"""The Ray transport: one actor a rank, each a WorkerHost."""

from __future__ import annotations

import functools
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import (
    GetTimeoutError,
    NodeDiedError,
    ObjectLostError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from core._calls.calls import Order, RankCall
from core._rows.wire import encode
from core._run.host import WorkerHost
from core._run.transport import Answered, Died, Identity, Outcome, Raised, RefusedIt
from core.errors import DeadlineExceeded
from core.group import RayClassWithInitArgs
from core.transport.ray.order import local_ranks, rank_order
from core.transport.ray.pickles import Pickled, checked, pickled, unpickled
from core.transport.ray.pool import RayResourcePool, need_ray
from core.worker import WorkerContext

if TYPE_CHECKING:
    from core._rows.remote import Kept

# After the first failure: time for the root cause to arrive, where a peer's error was faster.
SETTLE_S = 0.4
# After the first refusal: the others must find the same without waiting for anybody.
REFUSAL_GRACE_S = 10.0


class NoAnswer(Exception):
    """Carries an outcome that is no answer: of an exception Ray tells the driver before the other ranks have ended."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class RayHost(WorkerHost):
    """WorkerHost as an actor: it also says where it runs. Its methods give the bare value of an answer."""

    def fetch(self, handles: Any) -> list[Any]:
        return fetch(handles)

    def keep(self, value: Any) -> Any:
        return ray.put(value)

    def run_pickled(self, method: str, made: Pickled | None, answer: bool) -> Any:
        order, call = unpickled(made) if made else (Order(method), RankCall())
        return _sent(self.run(order, call, answer))

    def construct_from(self, made: tuple[type, Any, Any], context: WorkerContext, observers: tuple[object, ...]) -> Any:
        cls, args, kwargs = made
        return _sent(self.construct(cls, args, kwargs, context, observers, set_env=True))

    def route_of(self, mesh: str) -> Any:
        return _sent(self.route(mesh))

    def end(self) -> Any:
        return _sent(self.shutdown())

    def cut(self, part: Kept, ranges: Sequence[tuple[int, int]], names: tuple[str, ...]) -> Any:
        from core._rows.remote import cut

        return cut(part, ranges, names, self.fetch, self.keep)

    def identify(self) -> Identity:
        context = ray.get_runtime_context()
        gpus = ray.get_gpu_ids() if context.get_assigned_resources().get("GPU") else []
        logs = []
        for descriptor in (1, 2):  # Ray has pointed them at this process's log files
            with suppress(OSError):
                logs.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        files = tuple(dict.fromkeys(log for log in logs if os.path.isfile(log)))
        return Identity(
            context.get_node_id(), ray.util.get_node_ip_address(), os.getpid(), tuple(map(str, gpus)), files
        )


def host_class(methods: Iterable[str]) -> type[RayHost]:
    """RayHost with two actor methods for each method of the worker: `ask_x`, and `tell_x` where no answer is wanted.

    A call then needs no argument that says which: each costs some 70 microseconds for each rank.
    """

    def of(method: str, answer: bool) -> Callable[[RayHost, Pickled | None], Any]:
        def call(self: RayHost, made: Pickled | None = None) -> Any:
            return self.run_pickled(method, made, answer)

        return call

    calls = {f"{kind}_{each}": of(each, kind == "ask") for each in methods for kind in ("ask", "tell")}
    return type("RayHost", (RayHost,), calls)


class RayTicket:
    """Calls under way on actors."""

    def __init__(self, references: Mapping[int, Any]) -> None:
        self.ranks = frozenset(references)
        self._references = dict(references)

    def done(self) -> bool:
        references = list(self._references.values())
        ready, _ = ray.wait(references, num_returns=len(references), timeout=0)
        return len(ready) == len(references)

    def gather(self, timeout_s: float) -> dict[int, Outcome]:
        began = time.monotonic()
        with suppress(Exception):  # of whatever kind: below it is looked at rank by rank
            values = ray.get(list(self._references.values()), timeout=timeout_s)
            return {rank: Answered(value) for rank, value in zip(self._references, values, strict=True)}
        return self._gather_each(began + timeout_s)

    def _gather_each(self, deadline: float) -> dict[int, Outcome]:
        rank_of = {reference: rank for rank, reference in self._references.items()}
        waiting = list(rank_of)
        outcomes: dict[int, Outcome] = {}
        while waiting:
            left = deadline - time.monotonic()
            ready, _ = ray.wait(waiting, num_returns=1, timeout=max(left, 0))
            if not ready:
                break
            if len(waiting) > 1:
                ready, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
            for reference in ready:
                outcome = outcomes[rank_of[reference]] = _outcome(reference)
                if isinstance(outcome, RefusedIt):
                    deadline = min(deadline, time.monotonic() + REFUSAL_GRACE_S)
                elif not isinstance(outcome, Answered):
                    deadline = min(deadline, time.monotonic() + SETTLE_S)
            waiting = [reference for reference in waiting if rank_of[reference] not in outcomes]
        return outcomes


def _sent(outcome: Outcome) -> Any:
    if isinstance(outcome, Answered):
        return outcome.value
    raise NoAnswer(outcome)


def fetch(handles: Sequence[Any]) -> list[Any]:
    """Values of Ray's store."""
    return ray.get(list(handles)) if handles else []


def _outcome(reference: Any) -> Outcome:
    try:
        return Answered(ray.get(reference))
    except RayActorError as error:
        return Died(_how_it_ended(str(error)))
    except RayTaskError as error:  # outside the host's own guard: arguments or answer could not be (un)pickled
        cause = error.cause if isinstance(error.cause, BaseException) else None
        if isinstance(cause, NoAnswer):
            return cause.outcome
        return Raised(f"{type(cause or error).__name__}: {cause or error}", str(error), time.time())
    except (WorkerCrashedError, NodeDiedError, ObjectLostError) as error:
        return Died(f"{type(error).__name__}: {error}")
    except Exception as error:  # the driver cannot unpickle what the worker could pickle
        return Raised(f"the answer could not be read: {type(error).__name__}: {error}", str(error), time.time())


def _how_it_ended(text: str) -> str:
    """The lines of Ray's message that say how the process ended."""
    lines = [line.strip() for line in text.splitlines()]
    told = [line for line in lines if "exit" in line.lower() or "died" in line.lower()]
    return " ".join(told[:3]) or lines[0]


class RayTransport:
    """Actors on a pool, in order of rank.

    Args:
        methods: names of the worker's registered methods.
        env: environment variables of the actors' processes.
        python: their interpreter; None for the driver's.

    Raises:
        Refused: the pool cannot be placed.
        DeadlineExceeded: the actors' processes did not start in time.
    """

    keeps = "ray"

    def __init__(
        self,
        pool: RayResourcePool,
        group: str,
        methods: Iterable[str],
        env: Mapping[str, str],
        start_timeout_s: float,
        python: str | None = None,
    ) -> None:
        self.world_size, self._group = pool.world_size, group
        self._here = ray.get_runtime_context().get_node_id()
        self.ended = False
        placed_groups = pool.placement_groups()
        pool.let_in(self)  # not before there is room: a refused group is no tenant
        actor_class = ray.remote(host_class(methods))
        environment: dict[str, Any] = {"env_vars": dict(env)} if env else {}
        if python is not None:
            environment["py_executable"] = shlex.quote(python)  # Ray hands it to a shell
        self._actors: list[Any] = []
        self.identities: list[Identity] = []
        for placed in placed_groups:
            for bundle in range(placed.bundle_count):
                self._actors.append(
                    actor_class.options(
                        num_cpus=pool.cpus_per_process,
                        num_gpus=pool.gpus_per_process,
                        max_restarts=0,
                        runtime_env=environment or None,
                        scheduling_strategy=PlacementGroupSchedulingStrategy(
                            placed, placement_group_bundle_index=bundle
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

    def construct(self, cls_with_args: RayClassWithInitArgs, observers: tuple[object, ...]) -> RayTicket:
        parts = cls_with_args.cls, encode(cls_with_args.args), encode(dict(cls_with_args.kwargs))
        made = checked("__init__", lambda: ray.put(parts))
        references = {}
        for rank, (local_rank, local_size) in enumerate(local_ranks(self.identities)):
            context = WorkerContext(
                self._group, rank, self.world_size, local_rank, local_size, self._address, self._port
            )
            references[rank] = self._actors[rank].construct_from.remote(made, context, observers)
        return RayTicket(references)

    def route(self, mesh: str) -> RayTicket:
        return RayTicket({rank: actor.route_of.remote(mesh) for rank, actor in enumerate(self._actors)})

    def run(self, order: Order, calls: Mapping[int, RankCall], answering: frozenset[int]) -> RayTicket:
        need_ray()
        shared: dict[int, Any] = {}
        for call in calls.values():
            if id(call) not in shared:
                nodes = {self.node(rank) for rank, each in calls.items() if each is call}
                # All are pickled before any is sent: a call that reached some ranks only would hang them.
                shared[id(call)] = checked(order.method, functools.partial(self._on_wire, order, call, nodes))
        references = {}
        for rank, call in calls.items():
            made = shared[id(call)]
            kind = "ask" if rank in answering else "tell"
            remote = getattr(self._actors[rank], f"{kind}_{order.method}")
            references[rank] = remote.remote() if made is None else remote.remote(made)
        return RayTicket(references)

    def _on_wire(self, order: Order, call: RankCall, nodes: set[str]) -> Any:
        args, kwargs = encode(call.args), encode(dict(call.kwargs))
        if "core._rows.remote" in sys.modules:
            args = tuple(_cut(value, nodes) for value in args)
            kwargs = {key: _cut(value, nodes) for key, value in kwargs.items()}
        bare = not args and not kwargs and call.shard is None and order == Order(order.method)
        return None if bare else pickled((order, RankCall(args, kwargs, call.shard)))

    def node(self, rank: int) -> str:
        return self.identities[rank].node_id

    def fetch(self, handles: Sequence[Any]) -> list[Any]:
        """Values that this transport's workers have kept."""
        return fetch(handles)

    def cut(self, part: Kept, ranges: Sequence[tuple[int, int]], names: tuple[str, ...]) -> Any:
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


def _cut(value: Any, nodes: set[str]) -> Any:
    """What is to be fetched, with parts that lie on other nodes cut there: a node fetches whole objects."""
    from core._rows.remote import Fetch

    if not isinstance(value, Fetch):
        return value
    source = value.source

    def away(part: Kept, ranges: Sequence[tuple[int, int]], names: tuple[str, ...]) -> Any:
        whole = sum(stop - start for start, stop in ranges) >= part.num
        return None if whole or nodes == {source.node(part.rank)} else source.cut(part, ranges, names)

    return value.cut_at(away)


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
