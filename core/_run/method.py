"""A worker's registered method, bound to a group."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from core._calls.call import MethodSpec
from core._run.future import Future


class GroupMethod:
    """Called like the worker's method, with its signature and docstring.

    Calls reach each worker in the order in which they were made. A worker runs them one after another; those of
    coroutine methods begin in that order and then overlap.

    Args:
        group: the group's name.
        submit: begins a call: (method, arguments, whether its batches may stay with the workers).

    Attributes:
        overlaps: it is a coroutine method.
    """

    def __init__(
        self,
        name: str,
        spec: MethodSpec,
        function: Callable[..., Any],
        group: str,
        submit: Callable[[GroupMethod, inspect.BoundArguments, bool], Future],
    ) -> None:
        functools.update_wrapper(self, function)
        signature = inspect.signature(function)
        self.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
        self.__qualname__ = f"{group}.{name}"
        self.name, self.spec, self._submit = name, spec, submit
        self.overlaps = inspect.iscoroutinefunction(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it; as its registration says wait for the result, or give a Future."""
        future = self._submit(self, self._arguments(args, kwargs), not self.spec.blocking)
        return future.settled() if self.spec.blocking else future

    def later(self, *args: Any, **kwargs: Any) -> Future:
        """Run it, and give a Future. Batches of the result stay with the workers until somebody needs them."""
        return self._submit(self, self._arguments(args, kwargs), True)

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        try:
            return self.__signature__.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.__qualname__}{self.__signature__}: {error}") from None

    def __repr__(self) -> str:
        return f"<method {self.__qualname__}{self.__signature__}>"
