"""A worker's registered method, bound to a group."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from core._calls.call import MethodSpec
from core._run.future import Future

P = ParamSpec("P")
Rest = ParamSpec("Rest")
Batch = TypeVar("Batch")
Called_co = TypeVar("Called_co", covariant=True)
Result_co = TypeVar("Result_co", covariant=True)


class GroupMethod(Generic[P, Called_co, Result_co]):
    """Called like the worker's method, with its signature and docstring.

    Calls reach each worker in the order in which they were made. A worker runs them one after another; those of
    coroutine methods begin in that order and then overlap. The first argument may be a Future.

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
        submit: Callable[[GroupMethod[Any, Any, Any], inspect.BoundArguments, bool], Future[Any]],
    ) -> None:
        functools.update_wrapper(self, function)
        signature = inspect.signature(function)
        self.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
        self.__qualname__ = f"{group}.{name}"
        self.name, self.spec, self._submit = name, spec, submit
        self.overlaps = inspect.iscoroutinefunction(function)

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Called_co: ...
    @overload
    def __call__(
        self: GroupMethod[Concatenate[Batch, Rest], Called_co, Result_co],
        batch: Future[Batch],
        /,
        *args: Rest.args,
        **kwargs: Rest.kwargs,
    ) -> Called_co: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[misc]
        """Run it; as its registration says wait for the result, or give a Future."""
        future = self._submit(self, self._arguments(args, kwargs), not self.spec.blocking)
        return future.settled() if self.spec.blocking else future

    @overload
    def later(self, *args: P.args, **kwargs: P.kwargs) -> Future[Result_co]: ...
    @overload
    def later(
        self: GroupMethod[Concatenate[Batch, Rest], Called_co, Result_co],
        batch: Future[Batch],
        /,
        *args: Rest.args,
        **kwargs: Rest.kwargs,
    ) -> Future[Result_co]: ...
    def later(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[misc]
        """Run it, and give a Future. Batches of the result stay with the workers until somebody needs them."""
        return self._submit(self, self._arguments(args, kwargs), True)

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        try:
            return self.__signature__.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.__qualname__}{self.__signature__}: {error}") from None

    def __repr__(self) -> str:
        return f"<method {self.__qualname__}{self.__signature__}>"
