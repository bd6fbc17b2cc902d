"""An event loop in a thread of its own, for a rollout that serves while other threads call it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _End:
    """Behind a generator's last value."""


_END = _End()


class LoopThread:
    """The loop runs from construction until `end`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it there and wait for it, from any other thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def start(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Run it there, and go on at once."""
        asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def there(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it there and await it, on any loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def follow(self, values: AsyncGenerator[T]) -> AsyncIterator[T]:
        """The generator's values, for any loop; it runs on this one. Closing the stream closes the generator."""

        async def following() -> T | _End:
            return await anext(values, _END)

        async def each() -> AsyncIterator[T]:
            try:
                while not isinstance(value := await self.there(following()), _End):
                    yield value
            finally:
                await self.there(values.aclose())

        return each()

    def end(self) -> None:
        """Cancel what runs there, and end the thread."""

        async def cancel_all() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.call(cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
