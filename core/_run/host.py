"""What runs in a worker's process around the user's class: it takes its place, calls methods, and turns what happens
into outcomes that can travel."""

from __future__ import annotations

import inspect
import os
import pickle
import socket
import time
import traceback
from typing import Any

import attrs

from core._calls.call import Command, RankCall
from core._rows.stored import StoredPart
from core._rows.table import Get, PartTable
from core._rows.wire import contents, decode, digests, encode, mapped
from core._run.observers import MethodRun, Observer, Observers
from core._run.transport import Answered, BadlyAnswered, Outcome, Raised, RefusedIt
from core.device import open_listener
from core.errors import BadAnswer, Refused
from core.worker import WorkerContext, placed

CHECK_READS = "MANYMESH_CHECK_READS"


class WorkerHost:
    """Holds one worker. Its methods return outcomes and never raise, except for what ends a process.

    Attributes:
        fetch: gets values of the transport's store by handles; None where it has no store.
    """

    fetch: Get | None = None

    def __init__(self) -> None:
        self.worker: Any = None
        self.context = WorkerContext()
        self._listener: socket.socket | None = None
        self._build: tuple[type, tuple[Any, ...], dict[str, Any]] | None = None
        self._observers = Observers()

    def open_rendezvous(self, address: str) -> int:
        """Listen on a port of the system's choice, for the store that rank 0 will serve there."""
        self._listener = open_listener(address)
        return int(self._listener.getsockname()[1])

    def store(self, value: Any) -> Any:
        """Put a value into the transport's store; its handle."""
        raise NotImplementedError

    def construct(
        self,
        cls: type,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: WorkerContext,
        observers: tuple[Observer, ...] = (),
        *,
        set_env: bool,
    ) -> Outcome:
        """Take a place and construct the worker there."""
        if observers:
            self._build, self._observers = (cls, args, kwargs), Observers(observers)
        self.context = attrs.evolve(context, listener=self._listener)
        if set_env:
            os.environ.update(self.context.environment())
        try:
            with placed(self.context):
                self.worker = cls(*decode(args), **decode(kwargs))
        except Exception as error:
            return failed(error)
        return Answered(None)

    def route(self, mesh: str) -> Outcome:
        """This rank's (dp rank, whether it is collected) in the worker's mesh."""
        try:
            place = self.worker.mesh(mesh)
            return Answered((place.dp_rank, place.is_collect))
        except Exception as error:
            return failed(error)

    def run(self, command: Command, call: RankCall, answer: bool) -> Outcome:
        """Call the worker's method with private copies of the arguments, or with shared ones if it only reads."""
        run = _Run(self, command, call, answer)
        try:
            with placed(self.context, call.shard):
                args, kwargs = run.begin()
                value = getattr(self.worker, command.method)(*args, **kwargs)
                return run.end(value)
        except Exception as error:
            return run.failed(error)

    def shutdown(self) -> Outcome:
        try:
            with placed(self.context):
                if hasattr(self.worker, "shutdown"):
                    self.worker.shutdown()
        except Exception as error:
            return failed(error)
        return Answered(None)


async def run_coroutine(host: WorkerHost, command: Command, call: RankCall, answer: bool) -> Outcome:
    """WorkerHost.run for a coroutine method. It is no method of the class: with one, Ray would run all of an actor's
    methods on an event loop, where a library cannot run one of its own."""
    run = _Run(host, command, call, answer)
    try:
        with placed(host.context, call.shard):
            args, kwargs = run.begin()
            value = getattr(host.worker, command.method)(*args, **kwargs)
            return run.end(await value if inspect.isawaitable(value) else value)
    except Exception as error:
        return run.failed(error)


class _Run:
    """One run of a method: what is done before and after it."""

    def __init__(self, host: WorkerHost, command: Command, call: RankCall, answer: bool) -> None:
        self._host, self._command, self._call, self._answer = host, command, call, answer
        self._given: dict[str, Any] = {}
        self._digests: dict[str, str] = {}
        self._run: MethodRun | None = None
        self._began = 0.0

    def begin(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        host, command, call = self._host, self._command, self._call
        if host._observers and host._build is not None:
            self._run = MethodRun(host.context, host.worker, host._build, command, call, host.fetch)
            host._observers.tell("before_method", self._run)
            self._began = time.perf_counter()
        checked = command.reads_only and os.environ.get(CHECK_READS, "0") not in ("", "0")
        shared = command.reads_only and not checked
        args = decode(call.args, reads_only=shared, get=host.fetch)
        kwargs = decode(dict(call.kwargs), reads_only=shared, get=host.fetch)
        if checked:
            self._given = contents(args, kwargs)
            self._digests = digests(self._given)
        return args, kwargs

    def end(self, value: Any) -> Outcome:
        if names := [name for name, digest in digests(self._given).items() if self._digests[name] != digest]:
            who = f"rank {self._host.context.rank} wrote to {', '.join(names)}"
            raise RuntimeError(f"method {self._command.method!r} is registered with reads_only=True, but {who}")
        try:
            return self._notify(Answered(self._sendable(value) if self._answer else None))
        except Refused as error:  # the method has run, so it is no refusal
            return self._notify(BadlyAnswered(BadAnswer.of(error)))

    def failed(self, error: Exception) -> Outcome:
        return self._notify(failed(error))

    def _sendable(self, value: Any) -> Any:
        encoded = encode(value)
        if not self._command.stores:
            return encoded
        host = self._host

        def stored(item: Any) -> Any:
            return StoredPart.of(item, host.context.rank, host.store) if isinstance(item, PartTable) else item  # type: ignore[arg-type]

        return mapped(encoded, stored)

    def _notify(self, outcome: Outcome) -> Outcome:
        if self._run is not None:
            self._host._observers.tell("after_method", self._run, outcome, time.perf_counter() - self._began)
        return outcome


def failed(error: Exception) -> Outcome:
    """The outcome of a method that raised."""
    if isinstance(error, Refused | BadAnswer):
        kind = Refused if isinstance(error, Refused) else BadAnswer
        if _pickled(error) is None:
            error.have, error.want = repr(error.have), repr(error.want)
        if _pickled(error) is None:
            error = kind(str(error))
        error = error.with_traceback(None)
        return RefusedIt(error) if isinstance(error, Refused) else BadlyAnswered(error)
    return Raised(
        summary=f"{type(error).__name__}: {error}",
        traceback="".join(traceback.format_exception(error)),
        at=time.time(),
        error=_pickled(error),
        collective=_is_collective(error),
    )


def _pickled(error: BaseException) -> bytes | None:
    """The exception without its frames, if it survives pickling."""
    cause, context, trace = error.__cause__, error.__context__, error.__traceback__
    try:
        error.__cause__ = error.__context__ = error.__traceback__ = None
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    finally:
        error.__cause__, error.__context__, error.__traceback__ = cause, context, trace
    return data


_COLLECTIVE_SIGNS = ("gloo", "nccl", "connection closed by peer", "connection reset")


def _is_collective(error: BaseException | None) -> bool:
    while error is not None:
        text = str(error).lower()
        if type(error).__name__.startswith("Dist") or any(sign in text for sign in _COLLECTIVE_SIGNS):
            return True
        error = error.__cause__ or error.__context__
    return False
