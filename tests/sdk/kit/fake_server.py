"""A server made of a sound rollout, so that the suite for servers and ServerRollout are tested where none is installed.

Its engine stands in a thread. It samples a row anew with each power of two of its tokens, which row seeds make the same
ones, and hands them on one by one.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import attrs
import torch
from tensordict import TensorDict

from core.batch import objects
from core.engine import WeightSpec
from core.errors import Refused
from core.rollout import GenerationDelta, MemoryTag, PauseMode, SamplingParams
from manymesh.parts.base_rollout import Bucket
from manymesh.parts.checkpoint_weights import read_checkpoint
from manymesh.parts.event_loop import LoopThread
from manymesh.parts.rollout_rows import token_lists
from manymesh.parts.scoring import RowScore
from manymesh.parts.server_engine import ServerEngine
from manymesh.parts.server_rollout import ReleasingServerRollout
from sdk.conformance.suites.rollout_base import prompts, rows_of, sequences

FIRST = 16  # tokens


class Sampled:
    """Rows of one call, as far as they were sampled.

    Args:
        batch: prompt and prompt_id of each row; `samples[i][j]` is row j of prompt i.
    """

    def __init__(self, rollout: Any, lock: threading.Lock, batch: Any, sampling: SamplingParams) -> None:
        self._rollout, self._lock, self._batch = rollout, lock, batch
        seed = secrets.randbits(60) if sampling.seed is None and sampling.temperature else sampling.seed
        self._sampling, self._num = attrs.evolve(sampling, seed=seed), 0
        self.rows: list[tuple[list[int], list[float], str]] = []
        self.up_to(FIRST)

    def up_to(self, num_tokens: int) -> None:
        """Sample so many tokens of each row, unless it ends before."""
        while self._num < min(num_tokens, self._sampling.max_new_tokens):
            self._num = min(max(FIRST, 2 * self._num, self._sampling.min_new_tokens), self._sampling.max_new_tokens)
            with self._lock:
                out = self._rollout.generate(self._batch, attrs.evolve(self._sampling, max_new_tokens=self._num))
            reasons = objects(out.get("finish_reason"))
            rows = zip(rows_of(out), reasons, strict=True)
            self.rows = [(row.tokens, row.log_probs.tolist(), reason) for row, reason in rows]

    @property
    def is_all(self) -> bool:
        return self._num == self._sampling.max_new_tokens


@attrs.define(eq=False)
class RowRequest:
    """One row, and where it stands."""

    id: str
    prompt: list[int]
    prompt_id: int
    sampling: SamplingParams
    sampled: Sampled
    row: int
    has_begun: bool = False
    is_aborted: bool = False


class ThreadEngine(LoopThread):
    """A ReleasingServerEngine in a thread of this process."""

    is_staged = False

    def __init__(self, rollout: Any) -> None:
        super().__init__("fake server")
        self.rollout, self.lock = rollout, threading.Lock()
        self._requests: dict[str, RowRequest] = {}
        self._held = self._closed = False

    def sample(self, batch: Any, sampling: SamplingParams) -> Sampled:
        return Sampled(self.rollout, self.lock, batch, sampling)

    async def answer(self, request: RowRequest, version: int) -> AsyncIterator[GenerationDelta]:
        self._requests[request.id] = request
        response: list[int] = []
        start = 0  # of the response, what was sampled with older weights
        try:
            while True:
                while (self._held or (self._closed and not request.has_begun)) and not request.is_aborted:
                    await asyncio.sleep(0.002)
                if request.is_aborted:
                    yield GenerationDelta(request.id, (), (), version, "abort")
                    return
                request.has_begun = True
                if self.rollout.weight_version != version:
                    version, start, request.row = self.rollout.weight_version, len(response), 0
                    rest = attrs.evolve(
                        request.sampling, num_samples=1, max_new_tokens=request.sampling.max_new_tokens - start
                    )
                    request.sampled = self.sample(
                        prompts([*request.prompt, *response], prompt_id=[request.prompt_id]), rest
                    )
                at = len(response) - start
                request.sampled.up_to(at + 1)
                tokens, log_probs, reason = request.sampled.rows[request.row]
                is_last = at + 1 == len(tokens) and (reason == "stop" or request.sampled.is_all)
                response.append(tokens[at])
                yield GenerationDelta(request.id, (tokens[at],), (log_probs[at],), version, reason if is_last else None)
                if is_last:
                    return
                await asyncio.sleep(0.001)
        finally:
            del self._requests[request.id]

    def stream(self, request: RowRequest, version: int) -> AsyncIterator[GenerationDelta]:
        queue: asyncio.Queue[GenerationDelta | BaseException | None] = asyncio.Queue()

        async def run() -> None:
            try:
                async for delta in self.answer(request, version):
                    queue.put_nowait(delta)
                queue.put_nowait(None)
            except Exception as error:
                queue.put_nowait(error)

        async def begin() -> asyncio.Task[None]:
            self._requests[request.id] = request  # an abort that comes at once finds it
            return asyncio.create_task(run())

        async def cancel(task: asyncio.Task[None]) -> None:
            task.cancel()

        async def follow() -> AsyncIterator[GenerationDelta]:
            task = await self.there(begin())
            try:
                while (delta := await self.there(queue.get())) is not None:
                    if isinstance(delta, BaseException):
                        raise delta
                    yield delta
            finally:
                await self.there(cancel(task))

        return follow()

    async def answers(self, requests: Sequence[RowRequest], version: int) -> list[list[GenerationDelta]]:
        async def whole(request: RowRequest) -> list[GenerationDelta]:
            async with aclosing(self.answer(request, version)) as deltas:  # type: ignore[type-var]
                return [delta async for delta in deltas]

        return list(await asyncio.gather(*map(whole, requests)))

    async def scores(self, rows: Sequence[Sequence[int]], temperature: float, top_k: int) -> list[RowScore]:
        with self.lock:
            out = self.rollout.score(sequences(*rows), temperature=temperature, top_k=top_k)
        if not top_k:
            return [(row.tolist()[1:], [[]] * (len(row) - 1)) for row in out["log_probs"].unbind()]
        columns = (out[name].unbind() for name in ("log_probs", "top_ids", "top_log_probs"))
        return [
            (
                row.tolist()[1:],
                [list(zip(*best, strict=True)) for best in zip(ids.tolist(), top.tolist(), strict=True)][1:],
            )
            for row, ids, top in zip(*columns, strict=True)
        ]

    async def abort(self, request_ids: Sequence[str] | None) -> None:
        for request in self._requests.values():
            request.is_aborted |= request_ids is None or request.id in request_ids

    async def pause(self, mode: PauseMode) -> None:
        self._closed, self._held = True, mode == "keep"
        if mode == "abort":
            await self.abort(None)
        while mode != "keep" and any(request.has_begun for request in self._requests.values()):
            await asyncio.sleep(0.002)

    async def resume(self) -> None:
        self._closed = self._held = False

    async def check_health(self) -> None:
        return

    async def begin_load(self, specs: Sequence[WeightSpec], version: int) -> None:
        self.rollout.begin_weight_update(specs, version)

    async def load(self, bucket: Bucket) -> None:
        self.rollout.load_bucket(bucket)

    async def end_load(self, version: int) -> None:
        self.rollout.finish_weight_update()

    async def abort_load(self) -> None:
        self.rollout.abort_weight_update()

    async def release(self, tags: Sequence[MemoryTag], released_tags: frozenset[MemoryTag]) -> None:
        self.rollout.release(tags)

    async def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        self.rollout.resume(tags)

    def shutdown(self) -> None:
        self.end()
        self.rollout.shutdown()


class FakeServerRollout(ReleasingServerRollout):
    """Capability.SERVER, and all that the rollout has."""

    def __init__(self, rollout: Any) -> None:
        super().__init__(rollout._config, "cpu", rollout.mesh)
        self._rollout = rollout
        self._thread: ThreadEngine | None = None

    def _start(self) -> tuple[ServerEngine, dict[str, torch.Tensor]]:
        self._rollout.initialize()
        self._thread = ThreadEngine(self._rollout)
        return self._thread, read_checkpoint(self._config.model, self._config.load)[1]

    def _requests(
        self, prompts_of_rows: TensorDict, sampling: SamplingParams, sample: torch.Tensor, request_ids: Sequence[str]
    ) -> list[RowRequest]:
        """One call samples all rows: those of generate, or row `sample` of a submit's one prompt."""
        if self._thread is None:
            raise Refused("the rollout has no engine")
        is_one = len(prompts_of_rows) == 1
        step = 1 if is_one else sampling.num_samples
        texts, ids = token_lists(prompts_of_rows["prompt_ids"]), prompts_of_rows["prompt_id"].tolist()
        batch = prompts(*texts[::step], prompt_id=ids[::step]) if texts else None
        if batch is None:
            return []
        first = int(sample[0]) if is_one else 0
        sampled = self._thread.sample(batch, attrs.evolve(sampling, num_samples=first + 1 if is_one else step))
        return [
            RowRequest(request_id, texts[i], ids[i], sampling, sampled, first + i)
            for i, request_id in enumerate(request_ids)
        ]

    def _score_limits(self) -> tuple[int, int]:
        return 64, 512
