"""WorkerGroup: a worker class's registered methods, bound as methods of one object. It knows no transport."""

from __future__ import annotations

import functools
import inspect
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol, Self

import attrs

from core.calls import Call, Execute, MethodSpec, Order, RankCall
from core.dispatch import method_specs, named_mode
from core.errors import DeadlineExceeded, ManymeshError, Refused, WorkerFailed
from core.future import Future, resolved
from core.host import Answered, Died, Identity, Outcome, Raised, RefusedIt
from core.mesh import Route
from core.observe import Observers
from core.wire import decode


@attrs.frozen(init=False)
class RayClassWithInitArgs:
    """A worker class and what to construct it with on every rank."""

    cls: type
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = attrs.field(factory=dict)

    def __init__(self, cls: type, *args: Any, **kwargs: Any) -> None:
        self.__attrs_init__(cls, args, kwargs)


class Ticket(Protocol):
    """Calls under way on some ranks."""

    @property
    def ranks(self) -> frozenset[int]: ...
    def done(self) -> bool: ...
    def gather(self, timeout_s: float) -> dict[int, Outcome]:
        """Outcomes by rank: all of them, or what there is soon after the first that is no answer. Ranks that have not
        answered by the deadline are absent."""
        ...


class Transport(Protocol):
    """Carries calls to workers. The driver's only way to them.

    Attributes:
        keeps: kind of the store in which it can keep batches of answers; "" where it has none. Rows go from the workers
            of one transport to those of another of the same kind.
    """

    world_size: int
    identities: list[Identity]
    keeps: str

    def construct(self, cls_with_args: RayClassWithInitArgs, observers: tuple[object, ...]) -> Ticket: ...
    def route(self, mesh: str) -> Ticket: ...
    def run(self, order: Order, calls: Mapping[int, RankCall], answering: frozenset[int]) -> Ticket: ...
    def shutdown(self) -> Ticket: ...
    def end(self) -> None:
        """End all workers' processes now. Can be called twice."""
        ...

    def log_tail(self, rank: int) -> tuple[str, ...]:
        """Last lines that the rank's process wrote; empty where they can't be had."""
        ...


class WorkerGroup:
    """One world of ranks, and the registered methods of their class.

    Args:
        transport: ready workers' processes.
        cls_with_args: what to construct in each.
        name: for errors.
        timeout_s: deadline of a call that declares none.
        start_timeout_s: deadline of construction.
        observers: are told of every call; see core.observe and core.hookspecs.

    Raises:
        Refused: a registered method has a reserved name, or all constructors refused.
        WorkerFailed: a constructor raised; the processes have been ended.
    """

    def __init__(
        self,
        transport: Transport,
        cls_with_args: RayClassWithInitArgs,
        *,
        name: str | None = None,
        timeout_s: float = 7200.0,
        start_timeout_s: float = 300.0,
        observers: Sequence[object] = (),
    ) -> None:
        self.name = name or cls_with_args.cls.__name__
        self._transport, self._timeout_s, self._cls = transport, timeout_s, cls_with_args.cls
        self._routes: dict[str, Route] = {}
        self._failure: ManymeshError | None = None
        self._closed = False
        self._under_way: list[Future] = []
        self._observers = Observers(observers)
        try:
            self._specs = self._bind(cls_with_args.cls)
            self._settle(
                transport.construct(cls_with_args, self._observers.of_workers()), "__init__", None, start_timeout_s
            )
        except BaseException:
            transport.end()
            self._closed = True
            raise

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._transport.world_size

    @property
    def identities(self) -> tuple[Identity, ...]:
        """Node and process of each rank."""
        return tuple(self._transport.identities)

    @property
    def failed(self) -> bool:
        """Whether a worker has failed; then every call raises."""
        return self._failure is not None

    def route(self, mesh: str) -> Route:
        """The checked route of one of the workers' meshes.

        Raises:
            Refused: no such mesh, or one that would lose or double rows.
        """
        if mesh not in self._routes:
            self._check_alive("route")
            self._wait_for_earlier(None)
            timeout_s = min(self._timeout_s, 60.0)
            places = self._settle(self._transport.route(mesh), f"route of mesh {mesh!r}", mesh, timeout_s)
            dp_ranks = tuple(places[rank][0] for rank in range(self.world_size))
            route = Route(dp_ranks, frozenset(rank for rank, place in places.items() if place[1]))
            route.check(mesh)
            self._routes[mesh] = route
        return self._routes[mesh]

    def shutdown(self, timeout_s: float = 20.0) -> None:
        """Let the workers free what they hold, then end their processes. Can be called twice."""
        try:
            if not self._closed and self._failure is None:
                self._transport.shutdown().gather(timeout_s)
        finally:
            self._closed = True
            self._transport.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        state = "failed" if self.failed else "closed" if self._closed else "ready"
        return f"<{type(self).__name__} {self.name!r}: {self.world_size} ranks, {state}>"

    def __getattr__(self, name: str) -> Any:
        # Reached only for what is bound nowhere; typed Any, since the methods are the worker class's.
        from core.errors import did_you_mean

        if name.startswith("_"):
            raise AttributeError(name)
        if callable(getattr(self._cls, name, None)):
            raise AttributeError(f"{self._cls.__name__}.{name} is not on the group: it lacks @register")
        raise AttributeError(f"group {self.name!r} has no method {name!r}; {did_you_mean(name, self._specs)}")

    # -------------------------------------------------------------------------------------------- binding

    def _bind(self, cls: type) -> dict[str, MethodSpec]:
        methods = method_specs(cls)
        reserved = sorted({"name", *(name for name in dir(type(self)) if not name.startswith("_"))})
        clash = sorted(name for name in methods if name in reserved or name.startswith("_"))
        if clash:
            raise Refused(
                f"{cls.__name__} registers methods under names of the group's own: {', '.join(clash)}",
                have=clash,
                want=f"names other than {', '.join(reserved)}, without a leading underscore",
                where=f"group {self.name!r}",
                mend="rename the worker's methods",
            )
        specs = {}
        for name, (spec, function) in methods.items():
            if isinstance(spec.dispatch_mode, str):
                spec = attrs.evolve(spec, dispatch_mode=named_mode(spec.dispatch_mode))
            specs[name] = spec
            setattr(self, name, self._bound(name, spec, function))
        return specs

    def _bound(self, name: str, spec: MethodSpec, function: Callable[..., Any]) -> Callable[..., Any]:
        full = inspect.signature(function)
        signature = full.replace(parameters=list(full.parameters.values())[1:])

        @functools.wraps(function)
        def method(*args: Any, **kwargs: Any) -> Any:
            try:
                arguments = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{self.name}.{name}{signature}: {error}") from None
            future = self._submit(name, spec, arguments)
            return future.result() if spec.blocking else future

        method.__signature__ = signature  # type: ignore[attr-defined]
        method.__qualname__ = f"{self.name}.{name}"
        return method

    # -------------------------------------------------------------------------------------------- calling

    def _submit(self, method: str, spec: MethodSpec, arguments: inspect.BoundArguments) -> Future:
        self._check_alive(method)
        mode, began = spec.mode, time.perf_counter()
        call = Call(self.name, self.world_size, method, spec, arguments, self.route)
        for key, value in arguments.arguments.items():
            arguments.arguments[key] = resolved(value, call.where, remote=mode.remote and bool(self._transport.keeps))
        if self._observers:
            self._observers.tell("manymesh_before_dispatch", call=call)
        dealt = mode.dispatch(call)
        if len(dealt) != self.world_size:
            raise Refused(
                f"dispatch mode {mode.name} dealt to another number of ranks than the group has",
                have=len(dealt),
                want=self.world_size,
                where=call.where,
            )
        calls = {rank: each for rank, each in enumerate(dealt) if each is not None}
        if spec.execute_mode is Execute.RANK_ZERO:
            calls = {0: calls[0]}
        answering = mode.answering(call) if mode.answering else frozenset(calls)
        keep = not spec.blocking and mode.remote and mode.joins_rows and bool(self._transport.keeps)
        ticket = self._transport.run(Order(method, spec.mesh, spec.reads_only, keep), calls, answering)
        timeout_s = spec.timeout_s or self._timeout_s
        if self._observers:
            seconds = time.perf_counter() - began
            self._observers.tell("manymesh_after_dispatch", call=call, sent=calls, seconds=seconds)

        def finish() -> Any:
            answers: dict[int, Any] | None = None
            failed: BaseException | None = None
            try:
                self._wait_for_earlier(future)
                answers = self._settle(ticket, method, spec.mesh, timeout_s, rows=mode.joins_rows)
                result = mode.collect(call, {rank: answers[rank] for rank in answering})
                return self._stay(result, call.where) if keep else result
            except BaseException as error:
                failed = error
                raise
            finally:
                if self._observers:
                    facts = {"answers": answers, "seconds": time.perf_counter() - began, "error": failed}
                    self._observers.tell("manymesh_after_collect", call=call, **facts)

        future = Future(ticket, finish)
        self._under_way.append(future)
        return future

    def _stay(self, result: Any, where: str) -> Any:
        from core.remote import stays

        return stays(result, self._transport, where)

    def _wait_for_earlier(self, future: Future | None) -> None:
        """Settle the calls before `future`, or all of them.

        Ranks run calls in order, so no time is lost by it; and when one of them has failed on a rank, its peers would
        never come to this one.
        """
        if future is None or future in self._under_way:
            while self._under_way and self._under_way[0] is not future:
                with suppress(Exception):  # whoever holds that future gets it
                    self._under_way[0].result()
            if future is not None:
                self._under_way.pop(0)
        if self._failure is not None:
            raise self._failure

    def _settle(
        self, ticket: Ticket, method: str, mesh: str | None, timeout_s: float, *, rows: bool = False
    ) -> dict[int, Any]:
        """Wait for outcomes; give the answers, or end the group and raise."""
        outcomes = ticket.gather(timeout_s)
        bad = {rank: each for rank, each in outcomes.items() if not isinstance(each, Answered)}
        late = sorted(ticket.ranks - outcomes.keys())
        if not bad and not late:
            return {
                rank: decode(each.value, rows=rows) for rank, each in outcomes.items() if isinstance(each, Answered)
            }
        refusals = [each.error for each in bad.values() if isinstance(each, RefusedIt)]
        if len(refusals) == len(outcomes) and not late:
            raise refusals[0]
        self._transport_failed(self._explain(outcomes, late, method, mesh, timeout_s))
        raise self._failure  # type: ignore[misc]

    def _transport_failed(self, error: ManymeshError) -> None:
        self._transport.end()
        self._failure = self._failure or error

    def _explain(
        self, outcomes: dict[int, Outcome], late: list[int], method: str, mesh: str | None, timeout_s: float
    ) -> ManymeshError:
        bad = {rank: each for rank, each in outcomes.items() if not isinstance(each, Answered)}
        if not bad:
            return DeadlineExceeded(
                f"ranks {late} of group {self.name!r} did not answer {method!r} within {timeout_s:g} s",
                where=f"group {self.name!r}, method {method!r}",
                mend="the group has been ended; give the method a longer timeout_s if it is healthy but slow",
            )
        rank = min(bad, key=lambda rank: (self._blame(rank, bad[rank]), rank))
        first: Any = bad[rank]
        identity = self._transport.identities[rank]
        told: dict[str, str] = {}
        cause: BaseException | None = None
        mend = "the group's other ranks have been ended; build a new group"
        match first:
            case Raised():
                what, cause = f"rank {rank} of group {self.name!r} raised {first.summary}", _loaded(first.error)
                told = {"traceback": first.traceback}
            case RefusedIt():
                some = sorted(r for r, each in bad.items() if isinstance(each, RefusedIt))
                what, cause = f"only ranks {some} of group {self.name!r} refused: {first.error.message}", first.error
                told, mend = {"traceback": str(cause)}, f"a refusal must be found on all ranks alike; {mend}"
            case Died():
                what, told = f"the process of rank {rank} of group {self.name!r} died", {"exit": first.exit}
        error = WorkerFailed(
            what,
            group=self.name,
            rank=rank,
            node=identity.node_address,
            pid=identity.pid,
            method=method,
            mesh=mesh,
            log_tail=self._transport.log_tail(rank),
            mend=mend,
            **told,
        )
        error.__cause__ = cause
        return error

    def _blame(self, rank: int, outcome: Outcome) -> tuple[int, float]:
        """Sorts who failed first to the front. When one process dies or raises, its peers' collectives fail too:
        gloo and nccl errors, and processes that they abort, come last."""
        match outcome:
            case Raised():
                return (2 if outcome.collective else 0), outcome.at
            case Died():
                aborted = any("Fatal Python error: Aborted" in line for line in self._transport.log_tail(rank))
                return (3 if aborted else 1), 0.0
            case _:
                return 2, 0.0

    def _check_alive(self, method: str) -> None:
        if self._failure is not None:
            cause = self._failure
            raise WorkerFailed(
                f"group {self.name!r} has failed earlier, so {method!r} cannot run: {cause.message}",
                group=self.name,
                rank=getattr(cause, "rank", -1),
                method=method,
                mend="build a new group",
            ) from cause
        if self._closed:
            raise Refused(f"group {self.name!r} has been shut down", where=f"method {method!r}")


def _loaded(error: bytes | None) -> BaseException | None:
    """A worker's exception, where the driver has its class too."""
    with suppress(Exception):
        loaded = pickle.loads(error) if error else None
        return loaded if isinstance(loaded, BaseException) else None
    return None
