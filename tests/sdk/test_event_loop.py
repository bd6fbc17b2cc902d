"""A loop in a thread of its own: what runs there is heard of on any other loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Iterator

import pytest

from manymesh.parts.environment import environment_of
from manymesh.parts.event_loop import LoopThread


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread("test")
    yield thread
    thread.end()


def test_a_generators_values_are_followed_from_another_loop_in_order_none_among_them(thread: LoopThread) -> None:
    async def values() -> AsyncGenerator[int | None]:
        for number in (1, None, 2):
            await asyncio.sleep(0)
            yield number
        yield threading.get_ident()

    async def go() -> list[int | None]:
        return [value async for value in thread.follow(values())]

    *numbers, ran_in = asyncio.run(go())
    assert numbers == [1, None, 2]
    assert ran_in != threading.get_ident()


def test_a_stream_that_is_closed_closes_its_generator_there(thread: LoopThread) -> None:
    closings: list[int] = []

    async def values() -> AsyncGenerator[int]:
        try:
            while True:
                yield 1
        finally:
            closings.append(threading.get_ident())

    async def go() -> None:
        stream = thread.follow(values())
        assert await anext(stream) == 1
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(go())
    assert len(closings) == 1
    assert closings != [threading.get_ident()]


def test_an_error_of_the_generator_reaches_who_follows_it(thread: LoopThread) -> None:
    async def values() -> AsyncGenerator[int]:
        yield 1
        raise ValueError("no")

    async def go() -> None:
        async for _ in thread.follow(values()):
            pass

    with pytest.raises(ValueError, match="no"):
        asyncio.run(go())


def test_environment_variables_are_set_inside_and_restored_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        with environment_of({"MANYMESH_TEST_A": "1", "MANYMESH_TEST_B": "2"}):
            pairs.append((os.environ["MANYMESH_TEST_A"], os.environ["MANYMESH_TEST_B"]))
            raise ValueError("no")

    pairs: list[tuple[str, str]] = []
    monkeypatch.setenv("MANYMESH_TEST_A", "before")
    monkeypatch.delenv("MANYMESH_TEST_B", raising=False)
    with pytest.raises(ValueError, match="no"):
        fail()
    assert pairs == [("1", "2")]
    assert (os.environ["MANYMESH_TEST_A"], os.environ.get("MANYMESH_TEST_B")) == ("before", None)
