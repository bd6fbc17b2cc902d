"""Telling observers of calls. Nobody listens by default, and then it costs a look at an empty tuple."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from core._calls.call import Call, Command, RankCall
from core._run.transport import Outcome
from core.worker import WorkerContext


@attrs.frozen
class MethodRun:
    """A method's run in a worker.

    Attributes:
        context: the worker's place.
        worker: the worker.
        build: its class, and what it was constructed with.
        command: the method and its mesh.
        call: the arguments, in the form that crosses between processes, and the shard.
        fetch: gets values of the transport's store by handles.
    """

    context: WorkerContext
    worker: Any
    build: tuple[type, tuple[Any, ...], Mapping[str, Any]]
    command: Command
    call: RankCall
    fetch: Any = attrs.field(default=None, repr=False)


class Observer:
    """Is called around a group's calls. A group takes `observers=[...]`; a subclass overrides the methods it needs.

    The methods are called in the driver; `before_method` and `after_method` in the workers, where the observer comes by
    pickling. One that raises is logged, once for each method, and hurts neither the call nor the other observers.
    """

    def before_dispatch(self, call: Call) -> None:
        """Before a call's arguments are dealt: group, method, mesh and arguments are known."""

    def after_dispatch(self, call: Call, calls: Mapping[int, RankCall], seconds: float) -> None:
        """The call is on its way. Ranks that share a RankCall get one object.

        Args:
            seconds: since the call began.
        """

    def after_collect(
        self, call: Call, answers: Mapping[int, Any] | None, seconds: float, error: BaseException | None
    ) -> None:
        """The answers, by rank and in the form that crosses between processes, have been joined; or the call has failed
        with `error`."""

    def before_method(self, run: MethodRun) -> None:
        """In a worker, before a method runs."""

    def after_method(self, run: MethodRun, outcome: Outcome, seconds: float) -> None:
        """In a worker, after a method has run or raised."""


class Observers:
    """A group's observers, together."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self.all = tuple(observers)
        self._logged: set[tuple[int, str]] = set()

    def __bool__(self) -> bool:
        return bool(self.all)

    def of_workers(self) -> tuple[Observer, ...]:
        """Those that also listen in the workers, and so are sent to them."""
        return tuple(each for each in self.all if self._listens(each, "before_method", "after_method"))

    @staticmethod
    def _listens(observer: Observer, *methods: str) -> bool:
        return any(getattr(type(observer), method) is not getattr(Observer, method) for method in methods)

    def tell(self, method: str, *facts: Any) -> None:
        for number, observer in enumerate(self.all):
            try:
                getattr(observer, method)(*facts)
            except Exception:
                if (number, method) not in self._logged:
                    self._logged.add((number, method))
                    logging.getLogger("manymesh").exception("observer %r failed in %s", observer, method)
