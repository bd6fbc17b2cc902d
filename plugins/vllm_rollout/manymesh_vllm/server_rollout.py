"""Rollout with vLLM in a process of its own, which answers requests while others come, end and are updated."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from core.device import choose_device
from core.mesh import RankMesh
from core.rollout import MemoryTag, SamplingParams
from manymesh.parts.checkpoint_weights import read_checkpoint
from manymesh.parts.rollout_checks import (
    check_stop_strings,
    check_tags,
    eos_ids,
    has_tokenizer,
    load_tokenizer,
    not_initialized,
    stop_ids,
)
from manymesh.parts.rollout_rows import Prompts
from manymesh.parts.row_seeds import row_keys
from manymesh.parts.served_rollout import ServedEngine, ServedRollout
from manymesh_vllm import sampling as asked
from manymesh_vllm.config import VllmRolloutConfig
from manymesh_vllm.memory import SleepingMemory
from manymesh_vllm.plan import server_plan
from manymesh_vllm.server_engine import Request, ServerEngine


class VllmServerRollout(ServedRollout):
    """`core.rollout.RolloutServer` over vLLM: each rank has a replica, an engine in processes that end with its own.

    See `ServedRollout` for versions, pauses and updates. Temperatures below 0.01 are refused.

    Args:
        config: options; `config.model` is the directory to load.
        device: "cpu", "cuda" or None for what the machine has.
    """

    def __init__(self, config: VllmRolloutConfig, device: str | None = None) -> None:
        self._config = config
        self._device = choose_device(device, int(os.environ.get("LOCAL_RANK", "0")))
        in_world = dist.is_available() and dist.is_initialized()
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if in_world else (0, 1)
        planned = server_plan(config, world_size, None)
        super().__init__(RankMesh(planned.layouts["dense"], rank, planned.route))
        self._vllm: ServerEngine | None = None
        self._memory: SleepingMemory | None = None
        self._eos: tuple[int, ...] = ()
        self._has_tokenizer = False

    def _start(self) -> tuple[ServedEngine, dict[str, torch.Tensor]]:
        facts, expected = read_checkpoint(self._config.model)
        self._eos = eos_ids(facts.path)
        self._has_tokenizer = has_tokenizer(facts.path)
        engine = ServerEngine(self._config, facts, self._device, has_tokenizer=self._has_tokenizer)
        can_sleep = self._config.sleep_mode and self._device.type == "cuda"
        self._vllm, self._memory = engine, SleepingMemory(_Sleeper(engine), can_sleep=can_sleep)
        return engine, expected

    def _requests(
        self, table: Prompts, sampling: SamplingParams, sample: torch.Tensor, request_ids: Sequence[str]
    ) -> list[Request]:
        if self._vllm is None:
            raise not_initialized()
        model_config = self._vllm.llm.model_config
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

    def _check_can_release(self) -> None:
        assert self._memory is not None
        self._memory.check_can_sleep()

    def release(self, tags: Sequence[MemoryTag]) -> None:
        """Free memory, on CUDA with sleep_mode; what runs is aborted.

        Raises:
            Refused: vLLM frees nothing on this device.
        """
        self._running()
        check_tags(tags)
        assert self._memory is not None
        self._memory.release(tags)
        self._asleep = self._memory.asleep
        if "weights" in tags:
            self.abort_weight_update()
            self._version = None

    def resume(self, tags: Sequence[MemoryTag]) -> None:
        """Take memory again; what is not released stays as it is. Weights hold garbage then, until a whole update."""
        self._running()
        check_tags(tags)
        assert self._memory is not None
        self._memory.resume(tags)
        self._asleep = self._memory.asleep

    def shutdown(self) -> None:
        super().shutdown()
        self._vllm = self._memory = None


class _Sleeper:
    """What SleepingMemory asks of vLLM's LLM."""

    def __init__(self, engine: ServerEngine) -> None:
        self._engine = engine

    def sleep(self, level: int) -> None:
        self._engine.call(self._engine.llm.sleep(level))

    def wake_up(self, tags: list[str]) -> Any:
        self._engine.call(self._engine.llm.wake_up(tags))
