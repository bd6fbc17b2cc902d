"""The engine under a rollout that is a server: in a process of its own, reached through an event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from core.engine import WeightSpec
from core.rollout import GenerationDelta, MemoryTag, PauseMode
from manymesh.parts.base_rollout import Bucket
from manymesh.parts.scoring import RowScore

T = TypeVar("T")


class ServerEngine(Protocol):
    """An engine in a process of its own, and the event loop that talks to it. Coroutines run on that loop.

    Requests are whatever the backend's rollout makes of them.

    Attributes:
        is_staged: the weights before an update are whole until `end_load`.
    """

    @property
    def is_staged(self) -> bool: ...

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it there and wait for it, from any other thread."""
        ...

    async def there(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it there and await it, on any loop."""
        ...

    def stream(self, request: Any, version: int) -> AsyncIterator[GenerationDelta]:
        """A request's deltas, each of one weight version, on any loop. Closing it aborts the request.

        Args:
            version: for a last delta without tokens.
        """
        ...

    async def answers(self, requests: Sequence[Any], version: int) -> list[list[GenerationDelta]]:
        """All deltas by request. When one fails the others are aborted."""
        ...

    async def scores(self, rows: Sequence[Sequence[int]], temperature: float, top_k: int) -> list[RowScore]:
        """Scores by row of token ids, by the weights that are there when it runs."""
        ...

    async def abort(self, request_ids: Sequence[str] | None) -> None: ...
    async def pause(self, mode: PauseMode) -> None: ...
    async def resume(self) -> None: ...
    async def check_health(self) -> None: ...

    async def begin_load(self, specs: Sequence[WeightSpec], version: int) -> None:
        """The first bucket is about to come. Nothing runs."""
        ...

    async def load(self, bucket: Bucket) -> None: ...
    async def end_load(self, version: int) -> None:
        """All have come: put them to use. No KV cache of other weights is left."""
        ...

    async def abort_load(self) -> None:
        """Forget what has come since begin_load."""
        ...

    def shutdown(self) -> None: ...


class ReleasingServerEngine(ServerEngine, Protocol):
    """A ServerEngine that gives memory back. Nothing runs meanwhile."""

    async def release(self, tags: Sequence[MemoryTag], released_tags: frozenset[MemoryTag]) -> None:
        """Free the memory of these tags, in their order; `released_tags` have none already."""
        ...

    async def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Take it again, in their order."""
        ...
