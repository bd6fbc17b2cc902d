"""The Ray transport: one actor a rank, each a WorkerHost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pickle import PickleBuffer
from typing import Any

import numpy as np
import ray
from ray import cloudpickle
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

from core.calls import RankCall
from core.errors import DeadlineExceeded, Refused
from core.group import RayClassWithInitArgs
from core.host import Answered, Died, Identity, Outcome, Raised, RefusedIt, WorkerHost
from core.transport.ray.order import local_ranks, rank_order
from core.transport.ray.pool import RayResourcePool, need_ray
from core.wire import encode
from core.worker import WorkerContext

# Calls below it are sent with the request: Ray's own limit for that is 100 KiB.
INLINE_BYTES = 64 << 10
# After the first failure: time for the root cause to arrive, where a peer's error was faster.
SETTLE_S = 0.4
# After the first refusal: the others must find the same without waiting for anybody.
REFUSAL_GRACE_S = 10.0


class RayHost(WorkerHost):
    """WorkerHost as an actor: it also says where it runs."""

    def run_pickled(self, method: str, pickled: tuple[bytes, list[Any]], answer: bool) -> Outcome:
        data, arrays = pickled
        return self.run(method, cloudpickle.loads(data, buffers=arrays), answer)

    def construct_from(self, made: tuple[type, Any, Any], context: WorkerContext) -> Outcome:
        cls, args, kwargs = made
        return self.construct(cls, args, kwargs, context, set_env=True)

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
        rank_of = {reference: rank for rank, reference in self._references.items()}
        waiting = list(rank_of)
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout_s
        while waiting and (left := deadline - time.monotonic()) > 0:
            ready, _ = ray.wait(waiting, num_returns=1, timeout=left)
            if ready and len(waiting) > 1:
                ready, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
            for reference in ready:
                outcome = outcomes[rank_of[reference]] = _outcome(reference)
                if isinstance(outcome, RefusedIt):
                    deadline = min(deadline, time.monotonic() + REFUSAL_GRACE_S)
                elif not isinstance(outcome, Answered):
                    deadline = min(deadline, time.monotonic() + SETTLE_S)
            waiting = [reference for reference in waiting if rank_of[reference] not in outcomes]
        return outcomes


def _pickled(call: RankCall, method: str) -> Any:
    """A call as (pickle, its arrays), pickled once. A small one travels with the request, a large one by the store."""
    buffers: list[PickleBuffer] = []
    data = _checked(method, lambda: cloudpickle.dumps(call, protocol=5, buffer_callback=buffers.append))
    arrays = [np.asarray(each.raw()) for each in buffers]
    small = len(data) + sum(each.nbytes for each in arrays) <= INLINE_BYTES
    return (data, arrays) if small else ray.put((data, arrays))


def _checked(method: str, pickle: Callable[[], Any]) -> Any:
    try:
        return pickle()
    except Exception as error:  # pickling runs any object's own code
        raise Refused(
            f"the arguments of {method!r} cannot be sent to the workers",
            have=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            want="values that can be pickled",
        ) from error


def _outcome(reference: Any) -> Outcome:
    try:
        outcome: Outcome = ray.get(reference)
    except RayActorError as error:
        return Died(_how_it_ended(str(error)))
    except RayTaskError as error:  # outside the host's own guard: arguments or answer could not be (un)pickled
        cause = error.cause if isinstance(error.cause, BaseException) else None
        return Raised(f"{type(cause or error).__name__}: {cause or error}", str(error), time.time())
    except (WorkerCrashedError, NodeDiedError, ObjectLostError) as error:
        return Died(f"{type(error).__name__}: {error}")
    except Exception as error:  # the driver cannot unpickle what the worker could pickle
        return Raised(f"the answer could not be read: {type(error).__name__}: {error}", str(error), time.time())
    return outcome


def _how_it_ended(text: str) -> str:
    """The lines of Ray's message that say how the process ended."""
    lines = [line.strip() for line in text.splitlines()]
    told = [line for line in lines if "exit" in line.lower() or "died" in line.lower()]
    return " ".join(told[:3]) or lines[0]


class RayTransport:
    """Actors on a pool, in order of rank.

    Args:
        env: environment variables of the actors' processes.

    Raises:
        Refused: the pool cannot be placed.
        DeadlineExceeded: the actors' processes did not start in time.
    """

    def __init__(self, pool: RayResourcePool, group: str, env: Mapping[str, str], start_timeout_s: float) -> None:
        self.world_size, self._group = pool.world_size, group
        self._here = ray.get_runtime_context().get_node_id()
        self.ended = False
        placed_groups = pool.placement_groups()
        pool.let_in(self)  # not before there is room: a refused group is no tenant
        actor_class = ray.remote(RayHost)
        self._actors: list[Any] = []
        self.identities: list[Identity] = []
        for placed in placed_groups:
            for bundle in range(placed.bundle_count):
                self._actors.append(
                    actor_class.options(
                        num_cpus=pool.cpus_per_process,
                        num_gpus=pool.gpus_per_process,
                        max_restarts=0,
                        runtime_env={"env_vars": dict(env)} if env else None,
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

    def construct(self, cls_with_args: RayClassWithInitArgs) -> RayTicket:
        parts = cls_with_args.cls, encode(cls_with_args.args), encode(dict(cls_with_args.kwargs))
        made = _checked("__init__", lambda: ray.put(parts))
        references = {}
        for rank, (local_rank, local_size) in enumerate(local_ranks(self.identities)):
            context = WorkerContext(
                self._group, rank, self.world_size, local_rank, local_size, self._address, self._port
            )
            references[rank] = self._actors[rank].construct_from.remote(made, context)
        return RayTicket(references)

    def route(self, mesh: str) -> RayTicket:
        return RayTicket({rank: actor.route.remote(mesh) for rank, actor in enumerate(self._actors)})

    def run(self, method: str, calls: Mapping[int, RankCall], answering: frozenset[int]) -> RayTicket:
        need_ray()
        shared: dict[int, Any] = {}
        for call in calls.values():
            if id(call) not in shared:
                wire = RankCall(encode(call.args), encode(dict(call.kwargs)), call.shard)
                # All are pickled before any is sent: a call that reached some ranks only would hang them.
                shared[id(call)] = _pickled(wire, method)
        return RayTicket(
            {
                rank: self._actors[rank].run_pickled.remote(method, shared[id(call)], rank in answering)
                for rank, call in calls.items()
            }
        )

    def shutdown(self) -> RayTicket:
        if not ray.is_initialized():  # a call would start a new cluster
            return RayTicket({})
        return RayTicket({rank: actor.shutdown.remote() for rank, actor in enumerate(self._actors)})

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
