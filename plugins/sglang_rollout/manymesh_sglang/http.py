"""A small HTTP client on asyncio, for one server: JSON both ways, and streams of server-sent events.

A connection a request: on loopback it costs a fraction of a millisecond, and none is found closed that was kept.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import attrs

from core.errors import DeadlineExceeded, ManymeshError, Refused

Reader = asyncio.StreamReader


class ServerError(ManymeshError):
    """A server answered with an error, or with nothing.

    Attributes:
        said: what it answered, "" for nothing.
    """

    said = ""


@attrs.frozen
class HttpClient:
    """
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
            async with asyncio.timeout(timeout_s), self._asked(method, path, body) as chunks:
                data = b"".join([chunk async for chunk in chunks])
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the server didn't answer {path} within {timeout_s:g} s",
                have=self.explain() or None,
                where=self.address,
            ) from error
        return parsed(data)

    async def stream(self, path: str, body: Any) -> AsyncIterator[Any]:
        """The answer's events as they come. Raises as call, but for the deadline: a request may wait."""
        async with self._asked("POST", path, body) as chunks:
            rest = b""
            async for chunk in chunks:
                *events, rest = (rest + chunk).split(b"\n\n")
                for event in events:
                    data = event.removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        return
                    if data:
                        said = json.loads(data)
                        if isinstance(said, dict) and "error" in said:
                            raise _refused(self, path, 400, json.dumps(said["error"]))
                        yield said
        raise ServerError(f"{path} broke off", have=self.explain() or None, where=self.address)

    @asynccontextmanager
    async def _asked(self, method: str, path: str, body: Any) -> AsyncIterator[AsyncIterator[bytes]]:
        """The answer's body, once its status is known to be good."""
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port)
            writer.write(self._request(method, path, body))
            await writer.drain()
            status, headers = await _head(reader)
            async with aclosing(_body(reader, headers)) as chunks:  # type: ignore[type-var]
                if status >= 400:
                    raise _refused(
                        self, path, status, b"".join([chunk async for chunk in chunks]).decode(errors="replace")
                    )
                yield chunks
        except (OSError, EOFError, ValueError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise ServerError(
                f"the server cannot be asked for {path}",
                have=self.explain() or f"{type(error).__name__}: {error}",
                where=self.address,
            ) from error
        finally:
            if writer is not None:
                writer.close()

    def _request(self, method: str, path: str, body: Any) -> bytes:
        data = b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.address}", "Connection: close"]
        lines += [f"Content-Length: {len(data)}", "Content-Type: application/json"]
        if self.key is not None:
            lines.append(f"Authorization: Bearer {self.key}")
        return "\r\n".join([*lines, "", ""]).encode() + data


async def _head(reader: Reader) -> tuple[int, dict[str, str]]:
    status = (await reader.readuntil(b"\r\n")).split()[1]
    headers = {}
    while line := (await reader.readuntil(b"\r\n")).strip():
        name, _, value = line.partition(b":")
        headers[name.strip().lower().decode()] = value.strip().decode()
    return int(status), headers


async def _body(reader: Reader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readuntil(b"\r\n"), 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
    elif (length := headers.get("content-length")) is not None:
        yield await reader.readexactly(int(length))
    else:
        while chunk := await reader.read(2**16):
            yield chunk


def parsed(data: str | bytes) -> Any:
    """JSON, or the text where it is none."""
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace") if isinstance(data, bytes) else data


def _refused(client: HttpClient, path: str, status: int, said: str) -> ManymeshError:
    if status in (401, 403):
        return Refused(
            "the server doesn't take the key",
            have=f"{status} for {path}",
            where=client.address,
            mend="set api_key to the one that the server was started with",
        )
    error = ServerError(f"the server refused {path}", have=f"{status}: {said[:2000]}", where=client.address)
    error.said = said
    return error
