"""SGLang's Engine inside a process that is a training rank too.

By itself it takes the process over: signals, children that are not its own, an end of all when one of its processes
dies. Here it does none of this.
"""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing
import signal
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch

from core.errors import DeadlineExceeded, ManymeshError
from core.manifest import ModelFacts
from manymesh.parts.environment import environment_of
from manymesh.parts.rollout_checks import cannot_run
from manymesh.parts.scoring import RowScore
from manymesh_sglang.arguments import arguments, died, environment
from manymesh_sglang.config import SPARE, SglangRolloutConfig
from manymesh_sglang.flattened_bucket import flatten
from manymesh_sglang.sampling import PROBE, check_probe, row_score, score_request

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)


class LocalEngine:
    """SGLang's Engine, whose scheduler and detokenizer are children of this process. Not for several threads.

    Raises:
        Refused: SGLang doesn't take the model or the options.
    """

    def __init__(
        self, config: SglangRolloutConfig, facts: ModelFacts, device: torch.device, *, has_tokenizer: bool
    ) -> None:
        options = arguments(config, facts, device, has_tokenizer=has_tokenizer)
        self._timeout_s, self._num_receivers = config.update_timeout_s, config.tensor_parallel
        # SGLang sets NCCL's variables and more for its children, which would then be those of the trainer's groups.
        with environment_of(environment(device, config.tensor_parallel), whole=True), _signals_kept():
            from sglang.srt.entrypoints.engine import Engine

            before = set(multiprocessing.active_children())
            try:
                with _may_have_children():
                    self.engine = Engine(**options, log_requests=False, custom_sigquit_handler=_ignore)
            except (ValueError, NotImplementedError, RuntimeError, ImportError, AssertionError) as error:
                for child in set(multiprocessing.active_children()) - before:
                    child.kill()
                    child.join()
                raise cannot_run("SGLang", facts, error) from error
            atexit.unregister(self.engine.shutdown)  # it would end all children of this process
            self._manager = self.engine.tokenizer_manager
            self.engine.loop.run_until_complete(self._start_handling())
            for each in SIGNALS:
                with suppress(ValueError, RuntimeError):
                    self.engine.loop.remove_signal_handler(each)
            watchdog = self._manager._subprocess_watchdog
            self._processes = list(watchdog._processes)
            watchdog.stop()
            atexit.register(self._end_processes)  # else Python would wait for them
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGQUIT, _ignore)  # a scheduler that fails sends it; `_run` sees that it is gone
        info = self.engine._scheduler_init_result.scheduler_infos[0]
        self.max_tokens = int(info["max_total_num_tokens"]) - SPARE
        check_probe(self.generate([[1]], [PROBE])[0], "this process's engine")

    async def _start_handling(self) -> None:
        self._manager.auto_create_handle_loop()  # on the loop that runs; it takes signals, once

    def generate(self, prompts: Sequence[Sequence[int]], parameters: Sequence[Mapping[str, Any]]) -> list[Any]:
        """SGLang's answers by row.

        Raises:
            ManymeshError: its process has died.
        """
        answering = self.engine.async_generate(
            input_ids=[list(row) for row in prompts],
            sampling_params=[dict(each) for each in parameters],
            return_logprob=True,
        )
        answers = self._run(answering, None)
        return list(answers) if isinstance(answers, list) else [answers]

    def score(self, rows: Sequence[Sequence[int]], temperature: float, top_k: int) -> list[RowScore]:
        """Scores by row. Raises as generate."""
        answering = self.engine.async_generate(
            input_ids=[list(row) for row in rows],
            sampling_params=score_request(temperature),
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=top_k,
        )
        answers = self._run(answering, None)
        return [row_score(each, len(row), top_k) for each, row in zip(answers, rows, strict=True)]

    def begin_update(self) -> None:
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        self._checked("begin_weight_update", self._manager.begin_weight_update(BeginWeightUpdateReqInput(), None))

    def load(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Hand the tensors over in shared memory of the host, or of the GPU; they may be reused after return."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=serialized(bucket, self._num_receivers),
            load_format="flattened_bucket",
            flush_cache=False,
        )
        self._checked("update_weights_from_tensor", self._manager.update_weights_from_tensor(request, None))

    def end_update(self) -> None:
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        self._checked("end_weight_update", self._manager.end_weight_update(EndWeightUpdateReqInput(), None))

    def use_version(self, version: int) -> None:
        """Drop the KV cache of other weights. Raises ManymeshError where SGLang keeps some of it."""
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        flush = self._run(self._manager.flush_cache(), self._timeout_s)
        if not flush.success:
            raise ManymeshError("SGLang keeps the KV cache of the old weights", have=flush.message)
        request = UpdateWeightVersionReqInput(new_version=str(version), abort_all_requests=False)
        self._run(self._manager.update_weight_version(request), self._timeout_s)

    def release(self, tags: Sequence[str]) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        request = ReleaseMemoryOccupationReqInput(tags=list(tags))
        self._run(self._manager.release_memory_occupation(request, None), self._timeout_s)

    def resume(self, tags: Sequence[str]) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        request = ResumeMemoryOccupationReqInput(tags=list(tags))
        self._run(self._manager.resume_memory_occupation(request, None), self._timeout_s)

    def _checked(self, what: str, coroutine: Coroutine[Any, Any, Any]) -> None:
        success, message = self._run(coroutine, self._timeout_s)
        if not success:
            raise not_updated(what, message)

    def _run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        """Its value, unless one of SGLang's processes dies meanwhile: it would wait for ever."""

        async def watched() -> T:
            task = asyncio.ensure_future(coroutine)
            deadline = None if timeout_s is None else time.monotonic() + timeout_s
            while not task.done():
                await asyncio.wait({task}, timeout=1.0)
                if task.done():
                    break
                if dead := [each for each in self._processes if not each.is_alive()]:
                    task.cancel()
                    raise died(", ".join(f"{each.name}: exit code {each.exitcode}" for each in dead))
                if deadline is not None and time.monotonic() > deadline:
                    task.cancel()
                    raise DeadlineExceeded(f"SGLang didn't answer within {timeout_s:g} s")
            return task.result()

        value: T = self.engine.loop.run_until_complete(watched())
        return value

    def shutdown(self) -> None:
        """End SGLang's processes, and no others."""
        socket, self.engine.send_to_rpc = self.engine.send_to_rpc, None
        if socket is not None:
            socket.close(linger=0)

        async def cancel() -> None:
            tasks = [each for each in self._manager.asyncio_tasks if not each.done()]
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.engine.loop.run_until_complete(cancel())
        self._end_processes()
        atexit.unregister(self._end_processes)
        del self.engine, self._manager

    def _end_processes(self) -> None:
        for each in self._processes:
            each.kill()
        for each in self._processes:
            each.join()


def serialized(bucket: Sequence[tuple[str, torch.Tensor]], num_receivers: int) -> list[bytes]:
    """For each receiver a pickle of handles to the shared memory that holds the bucket's bytes: a handle is opened
    once."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    ordered, flat = flatten(bucket)
    metadata, at = [], 0
    for name, tensor in ordered:
        size = tensor.numel() * tensor.dtype.itemsize
        metadata.append(FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, at, at + size, size))
        at += size
    content = {"flattened_tensor": flat, "metadata": metadata}
    return [MultiprocessingSerializer.serialize(content) for _ in range(num_receivers)]


def not_updated(what: str, message: object) -> ManymeshError:
    return ManymeshError(
        "SGLang did not take the weights", have=message, where=what, mend="send all weights again, in a new update"
    )


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Whatever is set inside, outside signals do what they did."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.getsignal(each) for each in SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            if handler is not None:
                signal.signal(each, handler)


def _ignore(*_: Any) -> None:
    pass


@contextmanager
def _may_have_children() -> Iterator[None]:
    """Also where this process is one of multiprocessing's daemons. SGLang's processes watch their parent themselves."""
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    is_daemon = config.pop("daemon", None)
    try:
        yield
    finally:
        if is_daemon is not None:
            config["daemon"] = is_daemon
