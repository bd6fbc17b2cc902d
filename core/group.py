"""WorkerGroup: a worker class's registered methods, bound as methods of one object. It depends on no transport."""

from __future__ import annotations

import copy
import inspect
import logging
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Generic, Self, cast

import attrs

from core._calls.call import Call, Command, Execute, MethodSpec
from core._calls.deal import arguments_of, list_meant_per_rank
from core._calls.registered import method_specs
from core._rows.wire import decode
from core._run.build import RayClassWithInitArgs as RayClassWithInitArgs
from core._run.build import W as W
from core._run.colocate import ColocatedWorker as ColocatedWorker
from core._run.colocate import create_colocated_worker_cls as create_colocated_worker_cls
from core._run.failure import explain, explain_end
from core._run.future import Future as Future
from core._run.method import GroupMethod
from core._run.observers import MethodRun as MethodRun
from core._run.observers import Observer as Observer
from core._run.observers import Observers
from core._run.transport import Answered, BadlyAnswered, Identity, RefusedIt, Ticket, Transport
from core.errors import BadAnswer, ManymeshError, Refused, WorkerFailed, did_you_mean
from core.mesh import Route
from core.registry import EngineRegistry


@attrs.define
class _Life:
    """What a group and the roles in it share, since they share the processes."""

    failure: ManymeshError | None = None
    closed: bool = False
    under_way: list[Future[Any]] = attrs.field(factory=list)


class WorkerGroup(Generic[W]):
    """One world of ranks, and the registered methods of their class.

    Args:
        transport: ready workers' processes.
        build: what to construct in each.
        name: for errors.
        timeout_s: deadline of a call that declares none.
        start_timeout_s: deadline of construction.
        observers: are told of every call; see core._run.observers and core.hookspecs.

    Raises:
        Refused: a registered method has a reserved name, or all constructors refused.
        WorkerFailed: a constructor raised; the processes have been ended.
    """

    def __init__(
        self,
        transport: Transport,
        build: RayClassWithInitArgs[W],
        *,
        name: str | None = None,
        timeout_s: float = 7200.0,
        start_timeout_s: float = 300.0,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.name = name or build.cls.__name__
        self._transport, self._timeout_s, self._cls = transport, timeout_s, build.cls
        self._routes: dict[str, Route] = {}
        ranks = range(transport.world_size)
        self._flat = Route(tuple(ranks), frozenset(ranks))  # of modes without a mesh
        self._life, self._observers = _Life(), Observers(observers)
        self._roles, self._within = build.roles, ""
        try:
            for role in self._roles.values():
                self._check_names(role.cls)
            self._specs = self._bind(build.cls)
            self._settle(transport.construct(build, self._observers.of_workers()), "__init__", None, start_timeout_s)
        except BaseException:
            transport.end()
            self._life.closed = True
            raise

    @property
    def workers(self) -> type[W]:
        """This group, typed as its workers' class: completion and type checkers know `group.workers.method(...)` and
        `group.workers.method.later(...)`, with the result that the method's dispatch mode gives."""
        return cast(type[W], self)

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
        return self._life.failure is not None

    def spawn(self, roles: Collection[str] | None = None) -> dict[str, Self]:
        """The roles of a group of colocated workers (core._run.colocate), each with its class's methods and meshes.

        They are this same world: they fail together, calls run in the order in which they are made, and shutting one
        down shuts down all.

        Args:
            roles: which; all when not given.

        Raises:
            Refused: there is no such role, or the group's worker has none.
        """
        names = self._roles if roles is None else roles
        if not self._roles or (unknown := [role for role in names if role not in self._roles]):
            raise Refused(
                f"group {self.name!r} has no such roles" if self._roles else f"group {self.name!r} has no roles",
                have=sorted(self._roles) or self._cls.__name__,
                want=unknown if self._roles else "a worker made by create_colocated_worker_cls",
            )
        return {role: self._role(role) for role in names}

    def _role(self, role: str) -> Self:
        view = copy.copy(self)
        view.name, view._within, view._cls = f"{self.name}.{role}", f"{role}.", self._roles[role].cls
        view._routes, view._roles = {}, {}
        view._specs = view._bind(view._cls)
        return view

    def route(self, mesh: str) -> Route:
        """The checked route of one of the workers' meshes.

        Raises:
            Refused: no such mesh, or one that would lose or double rows.
        """
        if mesh not in self._routes:
            self._check_alive("route")
            self._wait_for_earlier(None)
            timeout_s = min(self._timeout_s, 60.0)
            places = self._settle(
                self._transport.route(self._within + mesh), f"route of mesh {mesh!r}", mesh, timeout_s
            )
            dp_ranks = tuple(places[rank][0] for rank in range(self.world_size))
            route = Route(dp_ranks, frozenset(rank for rank, place in places.items() if place[1]))
            route.check(mesh)
            self._routes[mesh] = route
        return self._routes[mesh]

    def shutdown(self, timeout_s: float = 20.0, *, report: bool = True) -> None:
        """Shut down the workers, then end their processes. Can be called twice.

        Args:
            timeout_s: deadline of the workers' own shutdown.
            report: log a warning where a worker raises, dies or misses the deadline: what it still had to write may be
                lost.
        """
        try:
            if not self._life.closed and self._life.failure is None:
                problem = explain_end(self._transport.shutdown(), self.name, self._transport, timeout_s)
                if problem is not None and report:
                    logging.getLogger("manymesh").warning("%s", problem)
        finally:
            self._life.closed = True
            self._transport.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown(report=error is None)

    def __repr__(self) -> str:
        state = "failed" if self.failed else "closed" if self._life.closed else "ready"
        return f"<{type(self).__name__} {self.name!r}: {self.world_size} ranks, {state}>"

    def __getattr__(self, name: str) -> Any:
        # Reached only for what is bound nowhere; typed Any, since the methods are the worker class's.
        if name.startswith("_"):
            raise AttributeError(name)
        if callable(getattr(self._cls, name, None)):
            raise AttributeError(f"{self._cls.__name__}.{name} is not on the group: it lacks @register")
        raise AttributeError(f"group {self.name!r} has no method {name!r}; {did_you_mean(name, self._specs)}")

    # -------------------------------------------------------------------------------------------- binding

    def _check_names(self, cls: type) -> None:
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

    def _bind(self, cls: type) -> dict[str, MethodSpec]:
        self._check_names(cls)
        specs = {}
        for name, (spec, function) in method_specs(cls).items():
            if isinstance(spec.dispatch_mode, str):
                spec = attrs.evolve(spec, dispatch_mode=EngineRegistry.default().dispatch_mode(spec.dispatch_mode))
            specs[name] = spec
            setattr(self, name, GroupMethod(name, spec, function, self.name, self._submit))
        return specs

    # -------------------------------------------------------------------------------------------- calling

    def _submit(self, method: GroupMethod[Any, Any, Any], arguments: inspect.BoundArguments, later: bool) -> Future:
        name, spec = method.name, method.spec
        self._check_alive(name)
        mode, began = spec.mode, time.perf_counter()
        stores = later and mode.joins_rows and bool(self._transport.store)
        route = self.route(mode.mesh) if mode.mesh is not None else self._flat
        call = Call(self.name, self.world_size, name, spec, arguments, route)
        call.source = self._transport if stores else None
        if not mode.on_tables:
            values = arguments_of(call, tables=False)
            call.arguments = arguments.signature.bind(*values.args, **values.kwargs)
        if self._observers:
            self._observers.tell("before_dispatch", call)
        shares = mode.dispatch(call)
        if len(shares) != self.world_size:
            raise Refused(
                f"dispatch mode {mode.name} dealt to another number of ranks than the group has",
                have=len(shares),
                want=self.world_size,
                where=call.where,
            )
        calls = {rank: rank_call for rank, rank_call in enumerate(shares) if rank_call is not None}
        if spec.execute_mode is Execute.RANK_ZERO:
            calls = {0: calls[0]}
        answering = mode.answering(call) if mode.answering else frozenset(calls)
        command = Command(self._within + name, spec.mesh, spec.reads_only, stores)
        ticket = self._transport.run(command, calls, answering)
        if self._observers:
            self._observers.tell("after_dispatch", call, calls, time.perf_counter() - began)

        def finish() -> Any:
            answers: dict[int, Any] | None = None
            failure: BaseException | None = None
            try:
                if not method.overlaps:
                    self._wait_for_earlier(future)
                answers = self._settle(ticket, name, spec.mesh, spec.timeout_s or self._timeout_s, call)
                collected = {rank: answers[rank] for rank in answering}
                return self._collected(call, collected)
            except BaseException as error:
                failure = error
                raise
            finally:
                if future in self._life.under_way:
                    self._life.under_way.remove(future)
                if self._observers:
                    self._observers.tell("after_collect", call, answers, time.perf_counter() - began, failure)

        future = Future(ticket, finish)
        if not method.overlaps:
            self._life.under_way.append(future)
        return future

    @staticmethod
    def _collected(call: Call, answers: dict[int, Any]) -> Any:
        """What the mode makes of the answers. The workers have run, so whatever it raises is a BadAnswer."""
        mode = call.spec.mode
        try:
            return mode.collect(call, answers if mode.on_tables else decode(answers))
        except BadAnswer:
            raise
        except ManymeshError as error:
            raise BadAnswer.of(error) from error
        except Exception as error:
            what = f"the answers of {call.method!r} cannot be joined"
            raise BadAnswer(what, have=f"{type(error).__name__}: {error}", where=call.where) from error

    def _wait_for_earlier(self, future: Future | None) -> None:
        """Settle the calls before `future`, or all of them.

        Ranks run calls in order, so no time is lost by it; and when one of them has failed on a rank, its peers would
        never come to this one.
        """
        under_way = self._life.under_way
        if future is None or future in under_way:
            while under_way and under_way[0] is not future:
                with suppress(Exception):  # whoever holds that future gets it
                    under_way[0].settled()
        if self._life.failure is not None:
            raise self._life.failure

    def _settle(
        self, ticket: Ticket, method: str, mesh: str | None, timeout_s: float, call: Call | None = None
    ) -> dict[int, Any]:
        """Wait for outcomes; give the answers as they came, or end the group and raise."""
        outcomes = ticket.gather(timeout_s)
        answers = {rank: outcome.value for rank, outcome in outcomes.items() if isinstance(outcome, Answered)}
        late = sorted(ticket.ranks - outcomes.keys())
        kinds = {type(outcome) for outcome in outcomes.values()}
        if kinds <= {Answered} and not late:
            return answers
        # Alike on all ranks, or of answers alone: the group is healthy.
        if (kinds == {RefusedIt} or kinds <= {Answered, BadlyAnswered}) and not late:
            raise next(each.error for each in outcomes.values() if isinstance(each, RefusedIt | BadlyAnswered))
        hint = list_meant_per_rank(call) if call is not None else ""
        error = explain(outcomes, late, self.name, self._transport, method, mesh, timeout_s, hint)
        self._transport.end()
        self._life.failure = self._life.failure or error
        raise self._life.failure

    def _check_alive(self, method: str) -> None:
        if (cause := self._life.failure) is not None:
            raise WorkerFailed(
                f"group {self.name!r} has failed earlier, so {method!r} cannot run: {cause.message}",
                group=self.name,
                rank=getattr(cause, "rank", -1),
                method=method,
                mend="build a new group",
            ) from cause
        if self._life.closed:
            raise Refused(f"group {self.name!r} has been shut down", where=f"method {method!r}")
