"""A call's result, later; and what becomes of one that is an argument of another call."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

from core._calls.calls import PerRank
from core._calls.join import is_remote
from core._rows.wire import mapped
from core._run.transport import Ticket
from core.errors import ManymeshError


class Future:
    """A call's result, later.

    Handed to another group's method as it is, its rows go from workers to workers, dealt anew for that group's mesh.
    They lie with the workers that made them: they can be had as long as that group is alive.
    """

    def __init__(self, ticket: Ticket | None, finish: Callable[[], Any] | None, value: Any = None) -> None:
        self._ticket, self._finish = ticket, finish
        self._outcome: tuple[bool, Any] | None = None if finish else (True, value)
        self._fetched: Any = None

    def done(self) -> bool:
        """Whether the ranks have run it."""
        return self._outcome is not None or (self._ticket is not None and self._ticket.done())

    def result(self) -> Any:
        """Wait for the result. Raises what a blocking call would; a second call gives the same."""
        if self._fetched is None:
            value, module = self.unfetched(), sys.modules.get("core._rows.remote")
            self._fetched = value if module is None else module.fetched(value)
        return self._fetched

    def __getitem__(self, key: Any) -> Any:
        """A part of the result: a column of a batch, which alone is fetched; or an item of a tuple or dict, as a Future
        where it is a batch."""
        item = self.unfetched()[key]
        rows = sys.modules.get("core._rows.rows")
        is_batch = is_remote(item) or (rows is not None and rows.is_batch(item))
        return Future(None, None, item) if is_batch else item

    def unfetched(self) -> Any:
        """The result with its batches where they are: core._rows.remote.RemoteRows, where they lie with workers."""
        if self._outcome is None and self._finish is not None:
            try:
                self._outcome = True, self._finish()
            except ManymeshError as error:
                self._outcome = False, error
            # It refers to this future: a circle would keep results until Python looks for such, which is seldom.
            self._ticket = self._finish = None
        assert self._outcome is not None
        ok, value = self._outcome
        if not ok:
            raise value
        return value


def resolved(value: Any, where: str, *, remote: bool = False) -> Any:
    """The value with Futures in it replaced by their results.

    Args:
        where: the call that needs them; named in the error of one that failed.
        remote: a batch that lies with other workers stays there.
    """
    if isinstance(value, Future):
        try:
            rows = value.unfetched()
            return rows if remote and is_remote(rows) else value.result()
        except ManymeshError as error:
            both = copy.copy(error)
            both.where = f"{error.where}; its result is an argument of {where}"
            raise both from error
    if isinstance(value, PerRank):
        return PerRank([resolved(item, where) for item in value.values])
    return mapped(value, lambda each: resolved(each, where) if isinstance(each, Future | PerRank) else each)
