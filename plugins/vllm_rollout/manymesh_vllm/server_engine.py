"""One vLLM engine in a process of its own, and the thread whose event loop talks to it."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import aclosing
from math import isfinite
from typing import Any

import attrs
import torch
import vllm
from safetensors.torch import save
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from core.engine import WeightSpec
from core.errors import ManymeshError, Refused
from core.manifest import ModelFacts
from core.rollout import GenerationDelta, LogProbKind, MemoryTag, PauseMode, SamplingParams
from manymesh.parts.base_rollout import Bucket
from manymesh.parts.environment import environment_of
from manymesh.parts.event_loop import LoopThread
from manymesh.parts.requests import RequestCheck, is_certain
from manymesh.parts.rollout_checks import cannot_run, not_finite
from manymesh.parts.scoring import RowScore
from manymesh.parts.server_rows import by_version
from manymesh_vllm import sampling as vllm_sampling
from manymesh_vllm.config import VllmServerConfig
from manymesh_vllm.engine_process import KIND, OWNER, ServerExtension
from manymesh_vllm.local_engine import arguments, check_platform
from manymesh_vllm.memory import sleep_steps

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    # In the first model runner sampling is one module, which can be put in place of vLLM's.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # A forked engine would have engine_process imported already, and not watch its owner.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


@attrs.frozen
class RowRequest:
    """One row.

    Attributes:
        certain: its tokens' log-probabilities are 0.
    """

    id: str
    prompt_ids: tuple[int, ...]
    parameters: vllm.SamplingParams
    certain: bool = False

    @classmethod
    def of(
        cls,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        stop_ids: Sequence[int],
        seed: int | None,
    ) -> RowRequest:
        [parameters] = vllm_sampling.requests(sampling, stop_ids, 1, None if seed is None else [seed])
        parameters.temperature = sampling.temperature  # log-probabilities are the sampler's affair here
        parameters.extra_args = {KIND: LogProbKind(sampling.log_probs).value}
        parameters.output_kind = RequestOutputKind.DELTA
        return cls(request_id, tuple(prompt_ids), parameters, is_certain(sampling))


class VllmServerEngine:
    """`ReleasingServerEngine` over vLLM's AsyncLLM, whose process ends with this one, however that ends.

    Coroutines of this class run on its own loop: `call` waits for one from any thread, `there` awaits one on any loop.

    Attributes:
        check: what requests are checked against.

    Raises:
        Refused: vLLM doesn't take the model or the options.
    """

    is_staged = False

    def __init__(self, config: VllmServerConfig, facts: ModelFacts, device: torch.device) -> None:
        self.check = RequestCheck.of(facts.path)
        extension = f"{ServerExtension.__module__}.{ServerExtension.__name__}"
        options = arguments(config, facts, device, has_tokenizer=self.check.has_tokenizer)
        options |= {"worker_extension_cls": extension, "seed": secrets.randbits(31)}
        environment = ENVIRONMENT | {OWNER: str(os.getpid())}
        if config.tensor_parallel > 1:
            _check_devices(config.tensor_parallel, device)
            options["distributed_executor_backend"] = "mp"  # in a Ray actor vLLM would take its placement group
            # vLLM binds processes to nodes of memory, of which there may be fewer.
            environment["VLLM_CPU_OMP_THREADS_BIND"] = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        self._running: set[str] = set()
        self._beginning: set[str] = set()  # of these, those of which nothing has come
        self._scoring = asyncio.Lock()  # scores of one temperature run at a time
        self._thread = LoopThread("vllm server")
        self.call, self.there = self._thread.call, self._thread.there

        async def build() -> AsyncLLM:  # on the loop, where vLLM starts its tasks
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**options))

        try:
            with environment_of(environment):
                check_platform(facts, device)
                self.llm = self.call(build())
            self.call(self.rpc("manymesh_sample_by_row"))
            self.call(self.llm.update_weight_version("0"))
        except (ValueError, NotImplementedError, RuntimeError) as error:
            self._thread.end()
            raise cannot_run("vLLM", facts, error) from error
        except BaseException:
            self._thread.end()
            raise

    async def rpc(self, method: str, *args: Any) -> None:
        try:
            await self.llm.collective_rpc(method, args=args)
        except EngineDeadError as error:
            raise _dead() from error
        except Exception as error:  # vLLM carries the message alone
            raise ManymeshError(f"vLLM's engine failed in {method!r}", have=str(error)) from error

    async def answer(self, request: RowRequest, version: int) -> AsyncGenerator[GenerationDelta]:
        """The request's deltas, each of one weight version.

        Args:
            version: for a last delta without tokens.

        Raises:
            Refused: a request of that id runs.
            ManymeshError: vLLM gave up on it, died, or has logits that are not finite.
        """
        if request.id in self._running:
            raise Refused("a request of this id runs already", have=request.id, mend="leave request_id out")
        self._running.add(request.id)
        self._beginning.add(request.id)
        num_sent = 0
        prompt = {"prompt_token_ids": list(request.prompt_ids)}
        answering = self.llm.generate(prompt, request.parameters, request.id)
        try:
            async with aclosing(answering):
                async for out in answering:
                    self._beginning.discard(request.id)
                    [row] = out.outputs
                    starts = (
                        [(span.version, span.start) for span in row.weight_versions or ()]
                        if out.finished
                        else self._starts(request.id)
                    )
                    for delta in _deltas(request, row, starts, num_sent, version, finished=out.finished):
                        version = delta.weight_version
                        yield delta
                    num_sent += len(row.token_ids)
        except EngineDeadError as error:
            raise _dead() from error
        finally:
            self._running.discard(request.id)
            self._beginning.discard(request.id)

    def _starts(self, request_id: str) -> list[tuple[str, int]]:
        """At which of a running request's tokens the versions begin that vLLM has noted down."""
        processor = self.llm.output_processor
        [internal] = processor.external_req_ids[request_id]
        return list(processor.request_states[internal].weight_version_starts)

    def stream(self, request: RowRequest, version: int) -> AsyncIterator[GenerationDelta]:
        """`answer`, for any loop. Closing it aborts the request."""
        return self._thread.follow(self.answer(request, version))

    async def answers(self, requests: Sequence[RowRequest], version: int) -> list[list[GenerationDelta]]:
        """All deltas by request. When one fails the others are aborted."""

        async def whole(request: RowRequest) -> list[GenerationDelta]:
            return [delta async for delta in self.answer(request, version)]

        tasks = [asyncio.ensure_future(whole(request)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def scores(self, rows: Sequence[Sequence[int]], temperature: float, top_k: int) -> list[RowScore]:
        """Scores by row.

        Raises:
            ManymeshError: vLLM gave up on a row, or died.
        """

        async def whole(row: Sequence[int]) -> RowScore:
            name = f"score-{secrets.token_hex(8)}"
            [out] = [each async for each in self.llm.generate({"prompt_token_ids": list(row)}, parameters, name)]
            return vllm_sampling.row_score(out, top_k)

        parameters = vllm_sampling.score_request(top_k)
        async with self._scoring:
            await self.rpc("manymesh_score_at", temperature)
            tasks = [asyncio.ensure_future(whole(row)) for row in rows]
            try:
                return list(await asyncio.gather(*tasks))
            except EngineDeadError as error:
                raise _dead() from error
            finally:
                for task in tasks:
                    task.cancel()

    async def abort(self, request_ids: Iterable[str] | None) -> None:
        ids = set(self._running) if request_ids is None else self._running & set(request_ids)
        ids_of_engine = self.llm.output_processor.external_req_ids
        while any(
            each not in ids_of_engine for each in ids & self._beginning
        ):  # vLLM passes over those on their way to it
            await asyncio.sleep(0.001)
        if ids:
            await self.llm.abort(list(ids))

    async def pause(self, mode: PauseMode) -> None:
        """The KV cache stays: it is good until the weights change."""
        await self.llm.pause_generation(mode=mode, clear_cache=False)

    async def resume(self) -> None:
        await self.llm.resume_generation()

    async def begin_load(self, specs: Sequence[WeightSpec], version: int) -> None:
        await self.rpc("manymesh_begin")

    async def load(self, bucket: Bucket) -> None:
        await self.rpc("manymesh_load", save({name: tensor.detach().cpu().contiguous() for name, tensor in bucket}))

    async def end_load(self, version: int) -> None:
        """Requests that have begun compute their KV cache anew.

        Raises:
            ManymeshError: vLLM keeps some of the cache.
        """
        await self.rpc("manymesh_finish")
        if not await self.llm.reset_prefix_cache(reset_running_requests=True):
            raise ManymeshError("vLLM keeps the KV cache of the old weights")
        await self.llm.update_weight_version(str(version))

    async def abort_load(self) -> None:
        await self.rpc("manymesh_abort")

    async def release(self, tags: Sequence[MemoryTag], released_tags: frozenset[MemoryTag]) -> None:
        for step in sleep_steps(tags, released_tags):
            if step.level is None:
                await self.llm.wake_up(list(step.tags))
            else:
                await self.llm.sleep(step.level)

    async def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        await self.llm.wake_up(list(tags))

    async def check_health(self) -> None:
        try:
            await self.llm.check_health()
        except EngineDeadError as error:
            raise _dead() from error

    def shutdown(self) -> None:
        async def end() -> None:
            self.llm.shutdown()

        self.call(end())
        self._thread.end()


def _check_devices(tensor_parallel: int, device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.device_count() < tensor_parallel:
        raise Refused(
            "a replica's processes have a GPU each, and are on the node of its rank",
            have=f"{torch.cuda.device_count()} GPUs that this process sees",
            want=f"tensor_parallel {tensor_parallel} of them",
            mend="give its pool as many gpus_per_process, or use the rollout 'vllm', which cuts a model over ranks",
        )


def _dead() -> ManymeshError:
    return ManymeshError("vLLM's engine process has died", mend="look at its log; build a new rollout")


def _deltas(
    request: RowRequest, row: Any, starts: Sequence[tuple[str, int]], num_sent: int, version: int, *, finished: bool
) -> Iterator[GenerationDelta]:
    """What vLLM has sampled since the last time, cut where weight versions begin."""
    if finished and row.finish_reason not in vllm_sampling.FINISHED:
        raise vllm_sampling.gave_up(row.finish_reason, request.id)
    tokens = tuple(row.token_ids)
    log_probs = tuple(row.logprobs.logprobs[: len(tokens)]) if tokens else ()
    if not all(map(isfinite, log_probs)):
        raise not_finite(f"request {request.id!r}, weight version {version}")
    if request.certain:
        log_probs = (0.0,) * len(tokens)
    pieces = by_version(starts, num_sent, num_sent + len(tokens))
    reason = row.finish_reason if finished else None
    for number, (piece_version, start, stop) in enumerate(pieces, 1):
        here = slice(start - num_sent, stop - num_sent)
        last = number == len(pieces)
        yield GenerationDelta(request.id, tokens[here], log_probs[here], piece_version, reason if last else None)
    if finished and not pieces:
        yield GenerationDelta(request.id, (), (), version, reason)
