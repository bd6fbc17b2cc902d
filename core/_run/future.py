"""A call's result, later; it may be an argument of another call meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from core._rows.table import Deferred, Table
from core._rows.wire import mapped, table_of
from core.errors import BadAnswer, ManymeshError, Refused

if TYPE_CHECKING:
    import typing_extensions

    Result_co = typing_extensions.TypeVar("Result_co", covariant=True, default=Any)
else:
    Result_co = TypeVar("Result_co", covariant=True)


class UnderWay(Protocol):
    """A call under way; a transport's Ticket is one."""

    def done(self) -> bool: ...


class Future(Deferred, Generic[Result_co]):
    """A call's result, later.

    Another group's method takes it as an argument. Its rows then go from workers to workers, dealt anew for that
    group's mesh. The workers that made the rows hold them, so they exist as long as that group is alive.
    """

    def __init__(self, ticket: UnderWay | None, finish: Callable[[], Any] | None, value: Any = None) -> None:
        self._ticket, self._finish = ticket, finish
        self._outcome: tuple[bool, Any] | None = None if finish else (True, value)
        self._result: Any = None

    def done(self) -> bool:
        """Whether the ranks have run it."""
        return self._outcome is not None or (self._ticket is not None and self._ticket.done())

    def result(self) -> Result_co:
        """Wait for the result. Raises what a plain call would; a second call gives the same.

        Raises:
            BadAnswer: also where its rows are gone, since the workers that made them have been ended.
        """
        if self._result is None:
            value = self.settled()
            try:
                self._result = mapped(value, lambda item: item.batch() if isinstance(item, Table) else item)
            except Refused as error:
                raise BadAnswer.of(error) from error
        result: Result_co = self._result
        return result

    def __getitem__(self, key: Any) -> Any:
        """A part of the result: a column of a batch, which alone is fetched; or an item of a tuple or dict, as a Future
        where it is a batch."""
        item = self.settled()[key]
        return item if table_of(item) is None else Future(None, None, item)

    def settled(self) -> Any:
        """The result, in which batches that lie with workers are tables."""
        if self._outcome is None and self._finish is not None:
            try:
                self._outcome = True, self._finish()
            except ManymeshError as error:
                self._outcome = False, error
            # `finish` refers to this future: the cycle would keep results until the garbage collector runs.
            self._ticket = self._finish = None
        assert self._outcome is not None
        is_result, value = self._outcome
        if not is_result:
            raise value
        return value

    def awaited(self, where: str) -> Any:
        try:
            return self.settled()
        except ManymeshError as error:
            both = copy.copy(error)
            both.where = f"{error.where}; its result is an argument of {where}"
            raise both from error
