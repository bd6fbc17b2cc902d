"""Rollout with vLLM in a process of its own, which answers requests while others come, end and are updated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict

from core.rollout import MemoryTag, SamplingParams
from manymesh.parts.checkpoint_weights import read_checkpoint
from manymesh.parts.rollout_checks import check_sleep_mode, not_initialized
from manymesh.parts.rollout_rows import token_lists
from manymesh.parts.row_seeds import row_keys
from manymesh.parts.server_engine import ServerEngine
from manymesh.parts.server_rollout import ReleasingServerRollout
from manymesh.parts.world_mesh import world_mesh, world_size
from manymesh_vllm import sampling as vllm_sampling
from manymesh_vllm.config import VllmServerConfig
from manymesh_vllm.local_engine import score_limits
from manymesh_vllm.plan import server_plan
from manymesh_vllm.server_engine import RowRequest, VllmServerEngine


class VllmServerRollout(ReleasingServerRollout):
    """`core.rollout.RolloutServer` over vLLM: each rank has a replica, an engine in processes that end with its own.

    Temperatures below 0.01 are refused. Releases memory on CUDA with sleep_mode.

    Args:
        config: options; `config.model` is the directory to load.
        device: "cpu", "cuda" or None for what the machine has.
    """

    _config: VllmServerConfig

    def __init__(self, config: VllmServerConfig, device: str | None = None) -> None:
        super().__init__(config, device, world_mesh(server_plan(config, world_size(), None)))
        self._vllm: VllmServerEngine | None = None

    def _start(self) -> tuple[ServerEngine, dict[str, torch.Tensor]]:
        facts, expected = read_checkpoint(self._config.model, self._config.load)
        self._vllm = VllmServerEngine(self._config, facts, self._device)
        return self._vllm, expected

    def _requests(
        self, prompts: TensorDict, sampling: SamplingParams, sample: torch.Tensor, request_ids: Sequence[str]
    ) -> list[RowRequest]:
        if self._vllm is None:
            raise not_initialized()
        model_config = self._vllm.llm.model_config
        vllm_sampling.check_untempered(sampling)
        ends = self._vllm.check.stop_ids(prompts, sampling, model_config.get_vocab_size(), model_config.max_model_len)
        seeds: Sequence[int | None] = [None] * len(prompts)
        if sampling.temperature and sampling.seed is not None:
            # vLLM wants them in an int64
            seeds = (row_keys(sampling.seed, prompts["prompt_id"].cpu(), sample) >> 1).tolist()
        rows = token_lists(prompts["prompt_ids"])
        return [
            RowRequest.of(request_id, row, sampling, ends, seed)
            for request_id, row, seed in zip(request_ids, rows, seeds, strict=True)
        ]

    def _score_limits(self) -> tuple[int, int]:
        if self._vllm is None:
            raise not_initialized()
        return score_limits(self._vllm.llm.model_config)

    def _check_can_release(self) -> None:
        check_sleep_mode("vLLM", self._device.type, sleep_mode=self._config.sleep_mode)

    def _resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        super()._resume_memory(tags)
        if self._paused:  # vLLM schedules again, of itself, as soon as it has all its memory
            engine = self._running()
            engine.call(engine.pause("keep"))

    def _close(self) -> None:
        self._vllm = None
        super()._close()
