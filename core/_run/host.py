"""What runs in a worker's process around the user's class: it takes its place, calls methods, and turns what happens
into outcomes that can travel."""

from __future__ import annotations

import os
import pickle
import socket
import time
import traceback
from typing import Any

import attrs

from core._calls.calls import Order, RankCall
from core._rows.wire import contents, decode, digests, encode
from core._run.observers import Observers
from core._run.transport import Answered, Outcome, Raised, RefusedIt
from core.errors import Refused
from core.worker import WorkerContext, placed

CHECK_READS = "MANYMESH_CHECK_READS"


class WorkerHost:
    """Holds one worker. Its methods return outcomes and never raise, except for what ends a process."""

    def __init__(self) -> None:
        self._worker: Any = None
        self.context = WorkerContext()
        self._listener: socket.socket | None = None
        self.made: Any = None
        self._observers = Observers()

    def open_rendezvous(self, address: str) -> int:
        """Listen on a port of the system's choice, for the store that rank 0 will serve there."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.socket(family)
        self._listener.bind((address, 0))
        self._listener.listen(1024)
        return int(self._listener.getsockname()[1])

    @property
    def worker(self) -> Any:
        return self._worker

    def fetch(self, handles: Any) -> list[Any]:
        """Values of the transport's store."""
        raise NotImplementedError

    def keep(self, value: Any) -> Any:
        """Put a value into the transport's store; its handle."""
        raise NotImplementedError

    def construct(
        self,
        cls: type,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: WorkerContext,
        observers: tuple[object, ...] = (),
        *,
        set_env: bool,
    ) -> Outcome:
        """Take a place and make the worker there."""
        if observers:
            self.made, self._observers = (cls, args, kwargs), Observers(observers)
        self.context = attrs.evolve(context, listener=self._listener)
        if set_env:
            os.environ.update(self.context.environment())

        def make() -> None:
            self._worker = cls(*decode(args), **decode(kwargs))

        return self._guarded(make)

    def route(self, mesh: str) -> Outcome:
        """This rank's (dp rank, whether it is collected) in the worker's mesh."""

        def look() -> tuple[int, bool]:
            found = self._worker.mesh(mesh)
            return found.dp_rank, found.is_collect

        return self._guarded(look)

    def run(self, order: Order, call: RankCall, answer: bool) -> Outcome:
        """Call the worker's method with private copies of the arguments, or with shared ones if it only reads."""

        def go() -> Any:
            checked = order.reads_only and os.environ.get(CHECK_READS, "0") not in ("", "0")
            shared = order.reads_only and not checked
            args = decode(call.args, reads_only=shared, get=self.fetch)
            kwargs = decode(dict(call.kwargs), reads_only=shared, get=self.fetch)
            given = contents(args, kwargs) if checked else {}
            before = digests(given)
            value = getattr(self._worker, order.method)(*args, **kwargs)
            if written := [what for what, each in digests(given).items() if before[what] != each]:
                who = f"rank {self.context.rank} wrote to {', '.join(written)}"
                raise RuntimeError(f"method {order.method!r} is registered with reads_only=True, but {who}")
            return value if answer else None

        if not self._observers:
            return self._guarded(go, call, order.keep)
        facts: dict[str, Any] = {"host": self, "order": order, "call": call}
        self._observers.tell("manymesh_before_method", **facts)
        began = time.perf_counter()
        outcome = self._guarded(go, call, order.keep)
        self._observers.tell("manymesh_after_method", outcome=outcome, seconds=time.perf_counter() - began, **facts)
        return outcome

    def shutdown(self) -> Outcome:
        return self._guarded(lambda: self._worker.shutdown() if hasattr(self._worker, "shutdown") else None)

    def _guarded(self, action: Any, call: RankCall | None = None, keep: bool = False) -> Outcome:
        try:
            with placed(self.context, call.shard if call else None):
                value = encode(action())
            if keep:
                from core._rows.remote import kept

                value = kept(value, self.context.rank, self.keep)
            return Answered(value)
        except Refused as error:
            if _pickled(error) is None:
                error.have, error.want = repr(error.have), repr(error.want)
            if _pickled(error) is None:
                error = Refused(str(error))
            return RefusedIt(error.with_traceback(None))
        except Exception as error:
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
        made = pickle.dumps(error)
        pickle.loads(made)
    except Exception:
        return None
    finally:
        error.__cause__, error.__context__, error.__traceback__ = cause, context, trace
    return made


_COLLECTIVE_SIGNS = ("gloo", "nccl", "connection closed by peer", "connection reset")


def _is_collective(error: BaseException | None) -> bool:
    while error is not None:
        text = str(error).lower()
        if type(error).__name__.startswith("Dist") or any(sign in text for sign in _COLLECTIVE_SIGNS):
            return True
        error = error.__cause__ or error.__context__
    return False
