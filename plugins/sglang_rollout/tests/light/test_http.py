"""The HTTP client, the server's engine and the uploads of weights against a small fake server on loopback."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import DeadlineExceeded, ManymeshError, Refused
from manymesh_sglang.http import HttpClient, ServerError
from manymesh_sglang.server_process import free_port
from manymesh_sglang.weight_upload import DiskUpload, DistributedUpload, post_checked

Answer = Callable[[str, Any, dict[str, str]], Any]


@asynccontextmanager
async def server(answer: Answer) -> AsyncIterator[HttpClient]:
    """`answer(path, body, headers)` gives (status, body), a list of stream lines, or None to hang up, or sleeps."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        data = await reader.readexactly(int(headers.get("content-length", 0)))
        reply = answer(head[0].split()[1], json.loads(data) if data else None, headers)
        if asyncio.iscoroutine(reply):
            reply = await reply
        if isinstance(reply, list):
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for piece in reply:
                writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            writer.write(b"0\r\n\r\n")
        elif reply is not None:
            status, body = reply
            body = body if isinstance(body, bytes) else json.dumps(body).encode()
            writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield HttpClient("127.0.0.1", listening.sockets[0].getsockname()[1], "the key", lambda: "how it is")
    finally:
        listening.close()


def test_bodies_and_keys_cross_both_ways() -> None:
    async def go() -> None:
        async with server(lambda path, body, headers: (200, [path, body, headers["authorization"]])) as client:
            reply = await client.call("POST", "/x", {"a": [1]}, timeout_s=10)
            assert reply == ["/x", {"a": [1]}, "Bearer the key"]
        async with server(lambda *_: (200, b"Cache flushed.")) as client:
            assert await client.call("POST", "/flush_cache", timeout_s=10) == "Cache flushed."

    asyncio.run(go())


def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port(0)}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)

    async def go() -> None:
        async with server(lambda *_: (200, {"is": "here"})) as client:
            assert await client.call("GET", "/x", timeout_s=10) == {"is": "here"}

    asyncio.run(go())


def test_an_answer_that_sends_elsewhere_is_an_error_and_the_key_stays_here() -> None:
    paths = []

    def answer(path: str, *_: Any) -> Any:
        paths.append(path)
        return 307, b""

    async def go() -> None:
        async with server(answer) as client:
            await client.call("POST", "/x", {}, timeout_s=10)

    with pytest.raises(ServerError, match=r"refused /x[\s\S]*307"):
        asyncio.run(go())
    assert paths == ["/x"]


def test_an_answer_of_many_megabytes_comes_whole() -> None:
    body = {"values": ["x" * 1000] * 20_000}

    async def go() -> None:
        async with server(lambda *_: (200, body)) as client:
            assert await client.call("POST", "/x", body, timeout_s=30) == body
        async with server(lambda *_: [b"data: " + json.dumps(body).encode() + b"\n\n", b"data: [DONE]\n\n"]) as client:
            assert [event async for event in client.stream("/x", {})] == [body]

    asyncio.run(go())


def test_events_come_one_by_one_however_they_are_cut() -> None:
    text = b'data: {"n": 1}\n\ndata: {"n": 2}\n\ndata: [DONE]\n\n'
    pieces = [text[:5], text[5:20], text[20:37], text[37:]]

    async def go(reply: list[bytes]) -> list[Any]:
        async with server(lambda *_: reply) as client:
            return [event async for event in client.stream("/generate", {})]

    assert asyncio.run(go(pieces)) == [{"n": 1}, {"n": 2}]
    with pytest.raises(ServerError, match=r"broke off[\s\S]*how it is"):
        asyncio.run(go([text[:16]]))
    with pytest.raises(ServerError, match="too long"):
        asyncio.run(go([b'data: {"error": {"message": "too long"}}\n\n']))


def test_errors_say_what_happened_and_where() -> None:
    async def slow() -> tuple[int, Any]:
        await asyncio.sleep(30)
        return 200, {}

    async def go(answer: Answer, timeout_s: float = 20) -> None:
        async with server(answer) as client:
            await client.call("POST", "/x", {}, timeout_s=timeout_s)

    with pytest.raises(Refused, match=r"doesn't take the key[\s\S]*401"):
        asyncio.run(go(lambda *_: (401, {"error": "Unauthorized"})))
    with pytest.raises(ServerError, match=r"refused /x[\s\S]*400: \{\"error\": \"bad\"\}"):
        asyncio.run(go(lambda *_: (400, {"error": "bad"})))
    with pytest.raises(ServerError, match=r"cannot be asked[\s\S]*how it is"):
        asyncio.run(go(lambda *_: None))
    with pytest.raises(DeadlineExceeded, match=r"didn't answer /x within 0.2 s"):
        asyncio.run(go(lambda *_: slow(), 0.2))
    client = HttpClient("127.0.0.1", free_port(0), None)
    with pytest.raises(ServerError, match="ConnectionRefusedError"):
        asyncio.run(client.call("GET", "/health", timeout_s=5))


@pytest.mark.parametrize("status", [200, 400])
def test_an_answer_without_success_is_an_error_with_its_message(status: int) -> None:
    async def go() -> None:
        async with server(lambda *_: (status, {"success": False, "message": "must run between"})) as client:
            await post_checked(client, "/update_weights_from_tensor", {}, 5)

    with pytest.raises(ManymeshError, match=r"did not take the weights[\s\S]*must run between"):
        asyncio.run(go())


def test_a_server_that_refuses_the_group_does_not_leave_the_sender_in_it() -> None:
    paths = []

    def answer(path: str, body: Any, _: dict[str, str]) -> Any:
        paths.append(path)
        return 200, {"success": False, "message": "no group here"}

    async def go() -> None:
        async with server(answer) as client:
            upload = DistributedUpload(client, 30, host="127.0.0.1", backend="gloo", device=torch.device("cpu"))
            await asyncio.wait_for(upload.begin(), 20)

    with pytest.raises(ManymeshError, match="no group here"):
        asyncio.run(go())
    assert paths == ["/init_weights_update_group"]


def test_a_server_that_never_comes_to_the_group_is_given_up_at_the_deadline() -> None:
    async def never() -> tuple[int, Any]:
        await asyncio.sleep(30)
        return 200, {}

    async def go() -> None:
        async with server(lambda *_: never()) as client:
            upload = DistributedUpload(client, 1, host="127.0.0.1", backend="gloo", device=torch.device("cpu"))
            await asyncio.wait_for(upload.begin(), 20)

    with pytest.raises(DeadlineExceeded):
        asyncio.run(go())


def test_weights_by_disk_are_one_directory_that_is_gone_afterwards(tmp_path: Path) -> None:
    files: dict[str, list[str]] = {}

    def answer(path: str, body: Any, _: dict[str, str]) -> Any:
        directory = Path(body["model_path"])
        files[path] = sorted(each.name for each in directory.iterdir())
        return 200, {"success": True, "message": ""}

    async def go() -> None:
        async with server(answer) as client:
            upload = DiskUpload(client, 10, str(tmp_path))
            await upload.begin()
            await upload.load([("a", torch.ones(2))])
            await upload.load([("b", torch.ones(3)), ("c", torch.ones(1, dtype=torch.bfloat16))])
            await upload.end()
            await upload.begin()
            await upload.load([("a", torch.ones(2))])
            await upload.abort()

    asyncio.run(go())
    assert files == {"/update_weights_from_disk": ["bucket-00000.safetensors", "bucket-00001.safetensors"]}
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_is_taken_is_refused_by_name() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        port = listener.getsockname()[1]
        with pytest.raises(Refused, match=rf"taken[\s\S]*{port}"):
            free_port(port)
    assert free_port(0) > 0
