"""Rollout with vLLM in a process of its own, which answers requests while others come, end and are updated."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save
from tensordict import TensorDict

from core.device import choose_device
from core.errors import Refused
from core.mesh import RankMesh
from core.protocols import GenerationDelta, MemoryTag, PauseMode, SamplingParams, WeightSpec
from manymesh_vllm import sampling as asked
from manymesh_vllm.config import VllmRolloutConfig
from manymesh_vllm.memory import SleepingMemory
from manymesh_vllm.plan import server_plan
from manymesh_vllm.serving import Request, ServedEngine
from sdk.parts.checkpoint_weights import read_checkpoint
from sdk.parts.rollout_checks import (
    check_stop_strings,
    check_tags,
    eos_ids,
    has_tokenizer,
    load_tokenizer,
    no_update,
    not_initialized,
    stop_ids,
    valid_version,
)
from sdk.parts.rollout_rows import Prompts
from sdk.parts.row_seeds import row_keys
from sdk.parts.served_rows import one_prompt, served_batch
from sdk.parts.weights import Announced, check_specs


class VllmServer:
    """`core.protocols.RolloutServer` over vLLM: each rank has a replica, an engine process that ends with its own.

    Versions are as those of VllmRollout. A weight update pauses what runs, in whatever thread it is called, and lets it
    go on with the new weights. Methods may be called from several threads, those of an update from one.

    Args:
        config: options; `config.model` is the directory to load.
        device: "cpu", "cuda" or None for what the machine has.

    Raises:
        Refused: tensor_parallel is not 1.
    """

    def __init__(self, config: VllmRolloutConfig, device: str | None = None) -> None:
        self._config = config
        self._device = choose_device(device, int(os.environ.get("LOCAL_RANK", "0")))
        in_world = dist.is_available() and dist.is_initialized()
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if in_world else (0, 1)
        planned = server_plan(config, world_size, None)
        self._mesh = RankMesh(planned.layouts["dense"], rank, planned.route)
        self._engine: ServedEngine | None = None
        self._memory: SleepingMemory | None = None
        self._expected: dict[str, torch.Tensor] = {}
        self._eos: tuple[int, ...] = ()
        self._has_tokenizer = False
        self._version: int | None = None
        self._update: _Update | None = None
        self._paused = self._asked_to_pause = False

    @property
    def mesh(self) -> RankMesh:
        return self._mesh

    @property
    def weight_version(self) -> int | None:
        return self._version

    def initialize(self) -> None:
        """Start the engine's process with the directory's weights, which are version 0.

        Raises:
            Refused: no checkpoint is there, or vLLM doesn't take it.
        """
        facts, self._expected = read_checkpoint(self._config.model)
        self._eos = eos_ids(facts.path)
        self._has_tokenizer = has_tokenizer(facts.path)
        self._engine = ServedEngine(self._config, facts, self._device, has_tokenizer=self._has_tokenizer)
        can_sleep = self._config.sleep_mode and self._device.type == "cuda"
        self._memory = SleepingMemory(_Sleeper(self._engine), can_sleep=can_sleep)
        self._update, self._version = None, 0
        self._paused = self._asked_to_pause = False

    # ---------------------------------------------------------------------------------------------- requests

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        prompt_id: int = 0,
        sample: int = 0,
    ) -> AsyncIterator[GenerationDelta]:
        """See `core.protocols.RolloutServer`. May be awaited on any event loop; closing it aborts the request.

        Raises:
            Refused: as generate, or num_samples is not 1.
        """
        version = self._may_sample(None)
        table = one_prompt(prompt_ids, sampling, prompt_id)
        [request] = self._requests(table, sampling, torch.tensor([sample]), [request_id or secrets.token_hex(8)])
        return self._running().stream(request, version)

    def generate(self, prompts: TensorDict, sampling: SamplingParams, *, min_version: int | None = None) -> TensorDict:
        """See `core.protocols.Rollout.generate` and VllmRollout's. Rows are in order, whichever ends first.

        Adds the column weight_versions, see `core.protocols.RolloutServer`. Rows that are aborted meanwhile come back
        as far as they were sampled.

        Raises:
            Refused: as VllmRollout's; a temperature below 0.01; generation is paused.
            ManymeshError: the engine died, or the model gave logits that are not finite.
        """
        version = self._may_sample(min_version)
        if self._asked_to_pause:
            raise Refused("generation is paused, so that generate would wait for ever", mend="resume_generation()")
        engine = self._running()
        table = Prompts.read(prompts)
        sample = torch.arange(sampling.num_samples).repeat(len(table))
        table = table.repeat(sampling.num_samples)
        requests = self._requests(table, sampling, sample, [secrets.token_hex(8) for _ in range(len(table))])
        answers = engine.call(engine.answers(requests, version)) if requests else []
        return served_batch(table, answers, sampling, version)

    def _requests(
        self, table: Prompts, sampling: SamplingParams, sample: torch.Tensor, request_ids: Sequence[str]
    ) -> list[Request]:
        """By row. Raises Refused for what cannot be sampled."""
        model_config = self._running().llm.model_config
        vocab_size = model_config.get_vocab_size()
        table.check(vocab_size, model_config.max_model_len, sampling.max_new_tokens)
        asked.check_untempered(sampling)
        ends = stop_ids(sampling, self._eos, vocab_size)
        check_stop_strings(sampling)
        if sampling.stop and not self._has_tokenizer:
            load_tokenizer(self._config.model)  # says what is missing
        seeds: Sequence[int | None] = [None] * len(table)
        if sampling.temperature and sampling.seed is not None:
            # vLLM wants them in an int64
            seeds = (row_keys(sampling.seed, table.prompt_id.cpu(), sample) >> 1).tolist()
        rows = table.tokens.cpu().split(table.lengths.tolist())
        return [
            Request.of(request_id, row.tolist(), sampling, ends, seed)
            for request_id, row, seed in zip(request_ids, rows, seeds, strict=True)
        ]

    def _may_sample(self, min_version: int | None) -> int:
        version = valid_version(self._version, min_version, self._state())
        if self._memory is not None and self._memory.asleep:
            raise Refused("the KV cache is released", mend="resume(['kv_cache']) before generating")
        return version

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """See `core.protocols.RolloutServer`."""
        engine = self._running()
        await engine.there(engine.abort(request_ids))

    async def pause(self, mode: PauseMode) -> None:
        """See `core.protocols.RolloutServer`. Raises Refused for an unknown mode."""
        if mode not in ("keep", "wait", "abort"):
            raise Refused("unknown mode of pause", have=mode, want="keep, wait or abort")
        engine = self._running()
        self._asked_to_pause = self._paused = True
        await engine.there(engine.pause(mode))

    async def resume_generation(self) -> None:
        """Let requests go on. Raises Refused while there are no valid weights: a weight update resumes by itself."""
        valid_version(self._version, None, self._state())
        engine = self._running()
        await engine.there(engine.llm.resume_generation())
        self._asked_to_pause = self._paused = False

    async def check_health(self) -> None:
        """Raises ManymeshError where the engine's process has died."""
        engine = self._running()
        await engine.there(engine.check_health())

    def _running(self) -> ServedEngine:
        if self._engine is None:
            raise not_initialized()
        return self._engine

    def _state(self) -> str:
        if self._memory is None:
            return "not initialized"
        if "weights" in self._memory.asleep:
            return "weights released"
        return "a weight update under way" if self._update else "weights released or an update not finished"

    # ------------------------------------------------------------------------------------------------ memory

    def release(self, tags: Sequence[MemoryTag]) -> None:
        """Free memory, on CUDA with sleep_mode; what runs is aborted.

        Raises:
            Refused: vLLM frees nothing on this device.
        """
        self._running()
        check_tags(tags)
        assert self._memory is not None
        self._memory.release(tags)
        if "weights" in tags:
            self.abort_weight_update()
            self._version = None

    def resume(self, tags: Sequence[MemoryTag]) -> None:
        """Take memory again; what is not released stays as it is. Weights hold garbage then, until a whole update."""
        self._running()
        check_tags(tags)
        assert self._memory is not None
        self._memory.resume(tags)

    # ----------------------------------------------------------------------------------------------- weights

    def begin_weight_update(self, specs: Sequence[WeightSpec], version: int) -> None:
        """See `core.protocols.Rollout`. Requests that run are kept, and wait. An update that was begun before and not
        finished is forgotten.

        Raises:
            Refused: names, shapes or kinds of dtype differ from the model's (dtypes of one kind are cast), or the
                weights are released. Nothing has changed then.
        """
        engine = self._running()
        if self._memory is not None and "weights" in self._memory.asleep:
            raise Refused(
                "the rollout's weights are released, so there is nothing to load into",
                mend="resume(['weights']) before the update",
            )
        check_specs(specs, self._expected)
        self.abort_weight_update()
        self._update = _Update(Announced(specs, self._expected), tuple(specs), version, self._version)
        self._version = None
        if not self._paused:
            engine.call(engine.pause("keep"))
            self._paused = True

    def load_bucket(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Send full tensors to the engine's process; they may be reused after return.

        Raises:
            Refused: no update was begun; a tensor was not announced, came before or has another shape. Nothing of the
                bucket is loaded then.
        """
        engine, update = self._running(), self._under_way()
        update.announced.check(bucket)
        if update.before_loading:
            specs = [(spec.name, list(spec.shape), spec.dtype) for spec in update.specs]
            update.before_loading = False
            engine.call(engine.rpc("manymesh_begin", specs, update.version))
        data = save({name: tensor.detach().cpu().contiguous() for name, tensor in bucket})
        engine.call(engine.rpc("manymesh_load", data))
        update.announced.came(bucket)

    def finish_weight_update(self) -> None:
        """Requests go on with the new weights, unless they were paused before.

        Raises:
            Refused: weights have not come, named; weight_version stays None then.
        """
        engine, update = self._running(), self._under_way()
        update.announced.check_complete()
        engine.call(engine.rpc("manymesh_finish"))
        engine.call(engine.use_version(update.version))
        self._update, self._version = None, update.version
        self._go_on()

    def abort_weight_update(self) -> None:
        """Forget the update.

        Where nothing was loaded yet, the weights are whole, and requests go on with them. Else weight_version stays
        None, what runs is aborted, and what was sampled of it is kept.
        """
        update, self._update = self._update, None
        if update is None:
            return
        if update.before_loading:
            self._version = update.version_before
            if self._version is not None:
                self._go_on()
            return
        engine = self._running()
        engine.call(engine.abort(None))
        engine.call(engine.rpc("manymesh_abort"))

    def _go_on(self) -> None:
        if self._paused and not self._asked_to_pause:
            engine = self._running()
            engine.call(engine.llm.resume_generation())
            self._paused = False

    def _under_way(self) -> _Update:
        if self._update is None:
            raise no_update()
        return self._update

    def shutdown(self) -> None:
        """End the engine's process. `initialize()` may start another."""
        if self._engine is not None:
            self._engine.shutdown()
        self._engine = self._memory = self._update = self._version = None


class _Update:
    """A weight update under way.

    Attributes:
        version_before: of the weights that are still whole while before_loading.
    """

    def __init__(
        self, announced: Announced, specs: tuple[WeightSpec, ...], version: int, version_before: int | None
    ) -> None:
        self.announced, self.specs, self.version = announced, specs, version
        self.version_before, self.before_loading = version_before, True


class _Sleeper:
    """What SleepingMemory asks of vLLM's LLM."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine

    def sleep(self, level: int) -> None:
        self._engine.call(self._engine.llm.sleep(level))

    def wake_up(self, tags: list[str]) -> Any:
        self._engine.call(self._engine.llm.wake_up(tags))
