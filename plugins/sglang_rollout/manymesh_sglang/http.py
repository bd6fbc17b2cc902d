"""Requests to one SGLang server over aiohttp: JSON both ways, streams of server-sent events, typed errors.

A connection a request: on loopback it costs a fraction of a millisecond, and none is found closed that was kept.
Proxies of the environment are not used: the server is on loopback, or at an address that the config gives.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import attrs

from core.errors import DeadlineExceeded, ManymeshError, Refused

NO_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=None)  # calls have deadlines of their own


class ServerError(ManymeshError):
    """A server answered with an error, or with nothing.

    Attributes:
        body: of its answer, "" for none.
    """

    body = ""


@attrs.frozen
class HttpClient:
    """One server, for coroutines of any event loop.

    Attributes:
        host, port: of the server.
        key: sent as a bearer token.
        explain: what is added to errors of a connection that broke: how the server is.
    """

    host: str
    port: int
    key: str | None = attrs.field(default=None, repr=False)
    explain: Callable[[], str] = attrs.field(default=lambda: "", repr=False)

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    async def call(self, method: str, path: str, body: Any = None, *, timeout_s: float | None) -> Any:
        """The answer's JSON, or its text where it is none.

        Raises:
            Refused: the server doesn't take the key.
            ServerError: it answered with an error, broke off, or cannot be reached.
            DeadlineExceeded: it didn't answer in time.
        """
        try:
            async with asyncio.timeout(timeout_s), self._answer(method, path, body) as answer:
                return parsed(await answer.read())
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the server didn't answer {path} within {timeout_s:g} s",
                have=self.explain() or None,
                where=self.address,
            ) from error

    async def stream(self, path: str, body: Any) -> AsyncIterator[Any]:
        """The answer's events as they come. Raises as call, but for the deadline: a request may wait."""
        async with self._answer("POST", path, body) as answer:
            rest = b""
            async for chunk in answer.content.iter_any():
                *events, rest = (rest + chunk).split(b"\n\n")
                for event in events:
                    data = event.removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        return
                    if data:
                        message = json.loads(data)
                        if isinstance(message, dict) and "error" in message:
                            raise _refusal(self, path, 400, json.dumps(message["error"]))
                        yield message
        raise ServerError(f"{path} broke off", have=self.explain() or None, where=self.address)

    @asynccontextmanager
    async def _answer(self, method: str, path: str, body: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer, once its status is known to be good."""
        headers = {"Content-Type": "application/json"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        data = None if body is None else json.dumps(body).encode()
        url = f"http://{self.address}{path}"
        try:
            async with (
                aiohttp.ClientSession(timeout=NO_TIMEOUT, trust_env=False) as session,
                session.request(method, url, data=data, headers=headers, allow_redirects=False) as answer,
            ):
                if answer.status >= 300:
                    raise _refusal(self, path, answer.status, (await answer.read()).decode(errors="replace"))
                yield answer
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(error, TimeoutError):
                raise
            cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
            raise ServerError(
                f"the server cannot be asked for {path}",
                have=self.explain() or f"{type(cause).__name__}: {cause}",
                where=self.address,
            ) from error


def parsed(data: str | bytes) -> Any:
    """JSON, or the text where it is none."""
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace") if isinstance(data, bytes) else data


def _refusal(client: HttpClient, path: str, status: int, body: str) -> ManymeshError:
    if status in (401, 403):
        return Refused(
            "the server doesn't take the key",
            have=f"{status} for {path}",
            where=client.address,
            mend="set api_key to the one that the server was started with",
        )
    error = ServerError(f"the server refused {path}", have=f"{status}: {body[:2000]}", where=client.address)
    error.body = body
    return error
