"""Types of registered methods: what a dispatch mode makes of the type that a worker's method answers. No code.

`register` is typed as the decorator of its mode: `DispatchMode[ListOfAnswers]` has `register` return a ListOfAnswers.
That gives a Registered method, which knows two faces. On a worker (an instance of the class) it is the method as it was
written. On a group it is a GroupMethod; `group.workers` is typed as the workers' class, and a Registered method that is
read from the class is the group's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

from core._run.future import Future
from core._run.method import GroupMethod
from core.loss import Metric

P = ParamSpec("P")
T = TypeVar("T")
Answer_co = TypeVar("Answer_co", covariant=True)
Called_co = TypeVar("Called_co", covariant=True)
Result_co = TypeVar("Result_co", covariant=True)


class Registered(Generic[P, Answer_co, Called_co, Result_co]):
    """A registered method: arguments, answer of a worker, type of a plain call on the group, and of its result."""

    @overload
    def __get__(self, worker: None, cls: type) -> GroupMethod[P, Called_co, Result_co]: ...
    @overload
    def __get__(self, worker: object, cls: type) -> Callable[P, Answer_co]: ...
    def __get__(self, worker: Any, cls: type) -> Any: ...


class ListOfAnswers(Protocol):
    """A list by rank."""

    def __call__(self, method: Callable[Concatenate[Any, P], T], /) -> Registered[P, T, list[T], list[T]]: ...


class ListOfOwnAnswers(Protocol):
    """A list by rank; arguments may be a PerRank each, so they are not checked."""

    def __call__(self, method: Callable[..., T], /) -> Registered[..., T, list[T], list[T]]: ...


class OneAnswer(Protocol):
    """The answer of one rank."""

    def __call__(self, method: Callable[Concatenate[Any, P], T], /) -> Registered[P, T, T, T]: ...


class JoinedAnswers(Protocol):
    """The answers joined by dp rank. Ranks that are not collected may answer None; Metrics come as floats."""

    @overload
    def __call__(self, method: Callable[Concatenate[Any, P], None], /) -> Registered[P, None, None, None]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(
        self, method: Callable[Concatenate[Any, P], dict[str, Metric] | None], /
    ) -> Registered[P, dict[str, Metric], dict[str, float], dict[str, float]]: ...
    @overload
    def __call__(
        self, method: Callable[Concatenate[Any, P], tuple[T | None, dict[str, Metric]] | None], /
    ) -> Registered[
        P, tuple[T | None, dict[str, Metric]] | None, tuple[T, dict[str, float]], tuple[T, dict[str, float]]
    ]: ...
    @overload
    def __call__(self, method: Callable[Concatenate[Any, P], T | None], /) -> Registered[P, T | None, T, T]: ...


class AnyResult(Protocol):
    """Nothing is known of the result: a mode found by its name, or one that doesn't say."""

    def __call__(self, method: Callable[Concatenate[Any, P], T], /) -> Registered[P, T, Any, Any]: ...


class AnyFuture(Protocol):
    """A plain call gives a future."""

    def __call__(self, method: Callable[Concatenate[Any, P], T], /) -> Registered[P, T, Future[Any], Any]: ...
