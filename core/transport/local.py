"""A group within the driver's own process: for debuggers, and for tests of what needs no second process.

Ranks run one after the other, so that a breakpoint in a worker stops the driver right there. A world of one can use
torch.distributed; ranks of a larger one cannot meet in a collective.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs

from core._calls.call import Command, RankCall
from core._rows.stored import RowsToFetch, StoredRows
from core._rows.wire import contents, decode, digests, encode, mapped
from core._run.build import RayClassWithInitArgs
from core._run.host import WorkerHost, run_coroutine
from core._run.observers import MethodRun, Observer
from core._run.transport import Answered, BadlyAnswered, Identity, Outcome, Raised, RefusedIt
from core.device import Accelerators
from core.errors import BadAnswer, Refused
from core.group import W, WorkerGroup
from core.worker import WorkerContext, placed


@attrs.frozen
class Ended:
    """A Ticket whose outcomes are there already: of a transport that waits for nobody."""

    outcomes: dict[int, Outcome]

    @property
    def ranks(self) -> frozenset[int]:
        return frozenset(self.outcomes)

    def done(self) -> bool:
        return True

    def gather(self, timeout_s: float) -> dict[int, Outcome]:
        return self.outcomes


class LocalTransport:
    """Workers in this process, one after the other. After a rank that fails the others are not called."""

    store = ""  # batches are in the driver's process anyway

    def __init__(self, world_size: int, group: str) -> None:
        self.world_size = world_size
        self.identities = [Identity("local", "127.0.0.1", os.getpid()) for _ in range(world_size)]
        self._group = group
        self._hosts = [WorkerHost() for _ in range(world_size)]

    def construct(self, build: RayClassWithInitArgs, observers: tuple[Observer, ...]) -> Ended:
        args, kwargs = encode(build.args), encode(dict(build.kwargs))
        contexts = [
            WorkerContext(self._group, rank, self.world_size, rank, self.world_size) for rank in range(self.world_size)
        ]
        return self._each(
            range(self.world_size),
            lambda rank: self._hosts[rank].construct(
                build.cls, _private(args), _private(kwargs), contexts[rank], observers, set_env=False
            ),
        )

    def route(self, mesh: str) -> Ended:
        return self._each(range(self.world_size), lambda rank: self._hosts[rank].route(mesh))

    def run(self, command: Command, calls: Mapping[int, RankCall], answering: frozenset[int]) -> Ended:
        def go(rank: int) -> Outcome:
            host, own = self._hosts[rank], private[rank]
            method = getattr(type(host.worker), command.method, None)
            if inspect.iscoroutinefunction(method):
                outcome = _run_to_end(run_coroutine(host, command, own, rank in answering))
            else:
                outcome = host.run(command, own, rank in answering)
            if not isinstance(outcome, Answered):
                return outcome
            try:
                return Answered(_private(outcome.value))
            except Exception as error:  # copying runs any object's own code
                return BadlyAnswered(BadAnswer("an answer cannot be sent to the driver", have=_describe(error)))

        try:  # all are copied before any runs
            private = {rank: _private_call(call) for rank, call in calls.items()}
        except Refused:
            raise
        except Exception as error:
            what = f"the arguments of {command.method!r} cannot be sent to the workers"
            raise Refused(what, have=_describe(error), want="values that can be copied") from error
        return self._each(calls, go)

    def shutdown(self) -> Ended:
        return self._each(range(self.world_size), lambda rank: self._hosts[rank].shutdown())

    def end(self) -> None:
        self._hosts = []

    def log_tail(self, rank: int) -> tuple[str, ...]:
        return ()

    def _each(self, ranks: Any, action: Callable[[int], Outcome]) -> Ended:
        outcomes: dict[int, Outcome] = {}
        for rank in ranks:
            outcomes[rank] = action(rank)
            if isinstance(outcomes[rank], Raised):
                break
        return Ended(outcomes)


def _here(value: Any) -> Any:
    """Rows that lie with workers of another group are fetched: these workers have no store to get them from."""
    return value.batch() if isinstance(value, StoredRows | RowsToFetch) else value


def _run_to_end(coroutine: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Run a coroutine in a thread and loop of its own: the driver may run in a loop itself."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


def _private_call(call: RankCall) -> RankCall:
    return RankCall(_private(encode(call.args, _here)), _private(encode(dict(call.kwargs), _here)), call.shard)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _private(encoded: Any) -> Any:
    """What Ray's pickling does between processes: nothing mutable is shared."""
    return copy.deepcopy(encoded)


class LoneRank:
    """One rank by itself, at the place that it had in a group: to run recorded calls again.

    Args:
        build: the worker's class, and what it is constructed with, in the form that crosses between processes.
        context: its place. Peers cannot be met.

    Raises:
        Refused: the constructor needs peers.
        RuntimeError: it raises.
    """

    def __init__(self, build: tuple[type, tuple[Any, ...], Mapping[str, Any]], context: WorkerContext) -> None:
        cls, args, kwargs = build
        here = Accelerators(("0",), (0,), 1) if context.accelerators else None  # this machine may have fewer
        self._host, self._context = WorkerHost(), attrs.evolve(context, master_port=0, accelerators=here)
        _succeeded(self._host.construct(cls, args, dict(kwargs), self._context, set_env=True), "__init__")

    def run(self, command: Command, call: RankCall) -> None:
        """Run a method, whose answer nobody wants."""
        _succeeded(self._host.run(command, call, True), command.method)

    def invoke(self, command: Command, call: RankCall, by: Callable[..., Any]) -> Any:
        """Call a method by `by(method, *args, **kwargs)`, for instance a debugger's; its answer. Raises what it
        raises."""
        method = getattr(self._host.worker, command.method)
        with placed(self._context, call.shard):
            return by(method, *decode(call.args), **decode(dict(call.kwargs)))


def _succeeded(outcome: Outcome, method: str) -> None:
    if isinstance(outcome, RefusedIt | BadlyAnswered):
        raise outcome.error
    if isinstance(outcome, Raised):
        raise RuntimeError(f"{method!r}, which ran before, raises {outcome.summary}\n{outcome.traceback}")


def fetched(run: MethodRun) -> RankCall:
    """A run's call with the rows in it that lie with other workers."""

    def here(value: Any) -> Any:
        return encode(value.batch(run.fetch)) if isinstance(value, StoredRows | RowsToFetch) else value

    return RankCall(mapped(run.call.args, here), mapped(dict(run.call.kwargs), here), run.call.shard)


def answer_digests(answer: Any) -> dict[str, str]:
    """A digest of an answer, and of each column where it is a batch, in whatever form."""
    return digests(contents([encode(answer)]))


class LocalWorkerGroup(WorkerGroup[W]):
    """A WorkerGroup in this process.

    Args:
        worker: the class to construct on each rank, or a RayClassWithInitArgs.
        args: of its constructor; keyword arguments are given by a RayClassWithInitArgs.
        world_size: number of ranks, run in turn.

    Raises:
        Refused: world_size is below 1.
    """

    def __init__(
        self,
        worker: type[W] | RayClassWithInitArgs[W],
        *args: Any,
        world_size: int = 1,
        name: str | None = None,
        timeout_s: float = 7200.0,
        observers: Sequence[Observer] = (),
    ) -> None:
        if world_size < 1:
            raise Refused("a group has at least one rank", have=world_size)
        build = RayClassWithInitArgs.of(worker, args)
        transport = LocalTransport(world_size, name or build.cls.__name__)
        super().__init__(transport, build, name=name, timeout_s=timeout_s, observers=observers)
