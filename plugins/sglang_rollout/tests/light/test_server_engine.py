"""The client's side of a server, over a client that stands for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from manymesh_sglang.sampling import Answer
from manymesh_sglang.server_engine import RowRequest, Running, SglangServerEngine


class Late:
    """A server that hears of a request only while an abort of it is under way, which doesn't find it then."""

    address = "late:1"

    def __init__(self) -> None:
        self.asked, self.hears = 0, asyncio.Event()
        self.knows = self.is_aborted = False

    async def call(self, method: str, path: str, body: Any = None, **_: Any) -> dict[str, bool]:
        assert path == "/abort_request"
        self.asked += 1
        self.is_aborted = self.knows
        self.hears.set()
        await asyncio.sleep(0.01)
        return {"success": True}

    async def stream(self, path: str, body: Any) -> AsyncIterator[dict[str, Any]]:
        await self.hears.wait()
        self.knows = True
        yield {}
        while not self.is_aborted:
            await asyncio.sleep(0.001)
        yield {}


def test_an_abort_finds_a_request_that_begins_while_it_is_asked_for(monkeypatch: Any) -> None:
    monkeypatch.setattr(Answer, "read", lambda self, reply: [])

    async def go() -> Late:
        client = Late()
        engine = SglangServerEngine.__new__(SglangServerEngine)
        engine._client, engine._process, engine._running, engine._rows = client, None, {}, set()  # type: ignore[assignment]
        engine._open = asyncio.Event()
        engine._open.set()
        running = engine._running["a"] = Running(RowRequest("a", (5,), {}))
        running.task = asyncio.ensure_future(engine._run(running))
        await asyncio.sleep(0)
        await engine.abort(None)
        await asyncio.wait_for(running.task, 5)
        return client

    client = asyncio.run(go())
    assert client.is_aborted
    assert client.asked == 2
