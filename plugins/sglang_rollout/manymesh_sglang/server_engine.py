"""One SGLang server, and the thread whose event loop talks to it by HTTP."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

import attrs

from core.engine import WeightSpec
from core.errors import DeadlineExceeded, ManymeshError, Refused
from core.rollout import GenerationDelta, MemoryTag, PauseMode
from manymesh.parts.base_rollout import Bucket
from manymesh.parts.event_loop import LoopThread
from manymesh.parts.scoring import RowScore
from manymesh_sglang.http import HttpClient, ServerError
from manymesh_sglang.sampling import PROBE, Answer, check_probe, row_score, score_request
from manymesh_sglang.server_process import ServerProcess
from manymesh_sglang.weight_upload import WeightUpload, post_checked

POLL_S = 0.05
DEATH_S = 3.0  # between a broken connection and the end of the process that broke it
CALL_S = 60.0  # for what a server answers without running the model


@attrs.frozen
class RowRequest:
    """One row.

    Attributes:
        id: by which it is known to who asks.
        rid: by which SGLang knows it. SGLang aborts all whose id begins alike, so that these have one length.
        certain: its tokens' log-probabilities are 0.
    """

    id: str
    prompt_ids: tuple[int, ...]
    parameters: dict[str, Any]
    certain: bool = False
    rid: str = attrs.field(factory=lambda: secrets.token_hex(16))


@attrs.define(eq=False)
class Running:
    """A request under way.

    Attributes:
        news: its deltas, or the error that it ended with.
        is_sent: SGLang was sent it.
        has_begun: something has come of it: SGLang knows it.
        is_aborted: it shall not begin.
    """

    request: RowRequest
    news: asyncio.Queue[GenerationDelta | ManymeshError] = attrs.field(factory=asyncio.Queue)
    is_sent: bool = False
    has_begun: bool = False
    is_aborted: bool = False
    task: asyncio.Task[None] | None = None


class SglangServerEngine:
    """manymesh.parts.server_engine.ReleasingServerEngine over a server.

    Args:
        process: where the server is this process's child: it is ended at the end.
        upload: how weights reach the server.
        timeout_s: for each step of a weight update, and a pause that waits for requests has none.
    """

    def __init__(
        self, client: HttpClient, process: ServerProcess | None, upload: WeightUpload, timeout_s: float
    ) -> None:
        self._client, self._process, self._upload, self._timeout_s = client, process, upload, timeout_s
        self._running: dict[str, Running] = {}  # by the id of who asks
        self._rows: set[str] = set()  # rids of answers
        self._thread = LoopThread("sglang server")
        self.call, self.there = self._thread.call, self._thread.there
        self._open = self.call(self._made_open())

    async def _made_open(self) -> asyncio.Event:
        """Whether requests may begin; made on the loop that waits for it."""
        event = asyncio.Event()
        event.set()
        return event

    # -------------------------------------------------------------------------------------------- requests

    async def _run(self, running: Running) -> None:
        """Ask for the request and put what comes into its queue, whether somebody reads it or not."""
        request = running.request
        answer = Answer(request.id, request.certain)
        try:
            await self._open.wait()
            running.is_sent = True
            body = _body([request.prompt_ids], [request.parameters], [request.rid]) | {"stream": True}
            async for reply in self._client.stream("/generate", body):
                running.has_begun = True
                for delta in answer.read(reply):
                    running.news.put_nowait(delta)
                if answer.finish_reason is not None:
                    return
            raise ServerError("a stream ended before its request", where=self._client.address)
        except ManymeshError as error:
            running.news.put_nowait(await self._explain(error, request.id))
        except asyncio.CancelledError:
            if not running.is_aborted:
                raise
            # It had not begun.
            running.news.put_nowait(GenerationDelta(request.id, (), (), -1, "abort"))
        finally:
            running.has_begun = True
            self._running.pop(request.id, None)

    async def _explain(self, error: ManymeshError, request_id: str) -> ManymeshError:
        deadline = asyncio.get_running_loop().time() + DEATH_S
        while (
            self._process is not None
            and isinstance(error, ServerError)
            and not self._process.exit()
            and asyncio.get_running_loop().time() < deadline
        ):
            await asyncio.sleep(POLL_S)  # a connection breaks before its process has ended
        if self._process is not None and (reply := self._process.explain()):
            return ManymeshError(
                f"request {request_id!r} ended with its server",
                have=reply,
                where=self._client.address,
                mend="submit it again, to a server that lives",
            )
        return error

    async def answer(self, request: RowRequest, version: int) -> AsyncGenerator[GenerationDelta]:
        """The request's deltas.

        Raises:
            Refused: a request of that id runs.
            ManymeshError: SGLang gave up on it, died, or has logits that are not finite.
        """
        if request.id in self._running:
            raise Refused("a request of this id runs already", have=request.id, mend="leave request_id out")
        running = self._running[request.id] = Running(request)
        running.task = asyncio.ensure_future(self._run(running))
        has_ended = False
        try:
            while not has_ended:
                news = await running.news.get()
                if isinstance(news, ManymeshError):
                    has_ended = True
                    raise news
                has_ended = news.finish_reason is not None
                yield attrs.evolve(news, weight_version=version) if news.weight_version < 0 else news
                version = news.weight_version
        finally:
            if not running.task.done():
                with suppress(ManymeshError):
                    await self._abort([running])
                running.task.cancel()

    def stream(self, request: RowRequest, version: int) -> AsyncIterator[GenerationDelta]:
        """`answer`, for any loop. Closing it aborts the request."""
        return self._thread.follow(self.answer(request, version))

    async def answers(self, requests: Sequence[RowRequest], version: int) -> list[list[GenerationDelta]]:
        """All rows by one request of HTTP."""
        rids = [each.rid for each in requests]
        body = _body([each.prompt_ids for each in requests], [each.parameters for each in requests], rids)
        rows = await self._rows_of(body, rids, "of generate")
        return [Answer(each.id, each.certain).read(row) for each, row in zip(requests, rows, strict=True)]

    async def scores(self, rows: Sequence[Sequence[int]], temperature: float, top_k: int) -> list[RowScore]:
        """All rows by one request of HTTP."""
        rids = [secrets.token_hex(16) for _ in rows]
        body = _body(rows, [score_request(temperature)] * len(rows), rids)
        reply = await self._rows_of(body | {"logprob_start_len": 0, "top_logprobs_num": top_k}, rids, "of score")
        return [row_score(each, len(row), top_k) for each, row in zip(reply, rows, strict=True)]

    async def _rows_of(self, body: dict[str, Any], rids: Sequence[str], request_id: str) -> list[Any]:
        """SGLang's answers, by row."""
        await self._open.wait()
        self._rows |= set(rids)
        try:
            reply = await self._client.call("POST", "/generate", body, timeout_s=None)
        except ManymeshError as error:
            raise await self._explain(error, request_id) from error
        finally:
            self._rows -= set(rids)
        return reply if isinstance(reply, list) else [reply]

    async def abort(self, request_ids: Sequence[str] | None) -> None:
        running = [each for name, each in self._running.items() if request_ids is None or name in request_ids]
        await self._abort(running)
        # Rows of answers that SGLang hears of only now would be missed by one call.
        while request_ids is None and self._rows:
            for rid in tuple(self._rows):
                await self._post("/abort_request", {"rid": rid})
            await asyncio.sleep(POLL_S)

    async def _abort(self, running: Sequence[Running]) -> None:
        """End them. One that SGLang doesn't know yet is asked for until it does; one that waits to begin never does."""
        rest = list(running)
        while rest:
            known = [each for each in rest if each.has_begun]  # one that begins while we ask may not have been found
            for each in rest:
                if not self._open.is_set() and not each.has_begun and each.task is not None:
                    each.is_aborted = True
                    each.task.cancel()
                else:
                    await self._post("/abort_request", {"rid": each.request.rid})
            rest = [each for each in rest if each not in known and not each.is_aborted]
            if rest:
                await asyncio.sleep(POLL_S)

    async def pause(self, mode: PauseMode) -> None:
        """What is kept loses its KV cache, which is computed anew when it goes on."""
        self._open.clear()
        if mode == "wait":
            while self._rows or any(each.is_sent for each in self._running.values()):
                await asyncio.sleep(POLL_S)
        elif mode == "abort":
            await self.abort(None)
            while any(each.is_sent and not each.is_aborted for each in self._running.values()):
                await asyncio.sleep(POLL_S)
        await self._post("/pause_generation", {"mode": "retract"})
        # The pause is not acknowledged; what comes behind it is, and changes nothing.
        info = await self._client.call("GET", "/model_info", timeout_s=CALL_S)
        await self._name_version(info["weight_version"], CALL_S)

    async def resume(self) -> None:
        await self._post("/continue_generation", {})
        self._open.set()

    async def check_health(self) -> None:
        """Raises ManymeshError where the server's process has died, or the server doesn't answer."""
        if self._process is not None:
            self._process.check()
        await self._client.call("GET", "/model_info", timeout_s=CALL_S)

    async def _post(self, path: str, body: Any) -> Any:
        return await self._client.call("POST", path, body, timeout_s=CALL_S)

    # --------------------------------------------------------------------------------------------- weights

    async def begin_load(self, specs: Sequence[WeightSpec], version: int) -> None:
        await self._upload.begin()

    async def load(self, bucket: Bucket) -> None:
        await self._upload.load(bucket)

    async def end_load(self, version: int) -> None:
        await self._upload.end()
        await self._client.call("POST", "/flush_cache", timeout_s=self._timeout_s)
        await self._name_version(str(version), self._timeout_s)

    async def _name_version(self, name: str, timeout_s: float) -> None:
        await post_checked(
            self._client, "/update_weight_version", {"new_version": name, "abort_all_requests": False}, timeout_s
        )

    @property
    def is_staged(self) -> bool:
        return self._upload.is_staged

    async def abort_load(self) -> None:
        await self._upload.abort()

    async def release(self, tags: Sequence[MemoryTag], released_tags: frozenset[MemoryTag]) -> None:
        await self._client.call("POST", "/release_memory_occupation", {"tags": list(tags)}, timeout_s=self._timeout_s)

    async def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        await self._client.call("POST", "/resume_memory_occupation", {"tags": list(tags)}, timeout_s=self._timeout_s)

    # ------------------------------------------------------------------------------------------ start and end

    async def ready(self, timeout_s: float) -> dict[str, Any]:
        """Wait until it serves; what it says of itself.

        Raises:
            Refused: it doesn't take the key, or samples its own way.
            ManymeshError: it died.
            DeadlineExceeded: it serves not in time. Its log's last lines are in the error, where it is our own.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            try:
                await self._client.call("GET", "/health", timeout_s=5)
                break
            except (ServerError, DeadlineExceeded) as error:
                if self._process is not None:
                    self._process.check()
                if asyncio.get_running_loop().time() > deadline:
                    last = f", its last lines:\n{self._process.last_lines()}" if self._process is not None else ""
                    raise DeadlineExceeded(
                        f"the server is not ready after {timeout_s:g} s",
                        have=f"{error.message}{last}",
                        where=self._client.address,
                        mend="see what it waits for; give it a longer start_timeout_s",
                    ) from error
            await asyncio.sleep(0.2)
        info: dict[str, Any] = await self._client.call("GET", "/server_info", timeout_s=CALL_S)
        probe = _body([(1,)], [PROBE], [secrets.token_hex(16)])
        check_probe(await self._client.call("POST", "/generate", probe, timeout_s=timeout_s), self._client.address)
        if self._process is not None:
            # On CPU each flush of the cache collects garbage: half a second, unless what is there now is left out.
            await self._post("/freeze_gc", {})
        return info

    def shutdown(self) -> None:
        self.call(self._upload.close())
        self._thread.end()
        if self._process is not None:
            self._process.end()


def _body(
    prompts: Sequence[Sequence[int]], parameters: Sequence[dict[str, Any]], rids: Sequence[str]
) -> dict[str, Any]:
    several = len(rids) > 1
    ids = [list(row) for row in prompts]
    return {
        "input_ids": ids if several else ids[0],
        "sampling_params": list(parameters) if several else parameters[0],
        "rid": list(rids) if several else rids[0],
        "return_logprob": True,
    }
