"""Rollout with SGLang's Engine in the worker's process: weights cross in shared memory of this host or GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from tensordict import TensorDict

from core.engine import WeightSpec
from core.errors import ManymeshError
from core.rollout import MemoryTag, SamplingParams
from manymesh.parts.base_rollout import BaseReleasingRollout, Bucket
from manymesh.parts.checkpoint_weights import read_checkpoint
from manymesh.parts.requests import is_certain
from manymesh.parts.rollout_checks import check_sleep_mode, not_initialized
from manymesh.parts.rollout_rows import answer, read_prompts, repeat_samples, token_lists
from manymesh.parts.scoring import parts, read_sequences, scores
from manymesh.parts.world_mesh import world_mesh, world_size
from manymesh_sglang.config import SglangRolloutConfig
from manymesh_sglang.local_engine import LocalEngine
from manymesh_sglang.plan import plan
from manymesh_sglang.requests import Asking
from manymesh_sglang.sampling import Answer


class SglangRollout(BaseReleasingRollout):
    """`core.rollout.ScoringRollout` over SGLang, whose engine this process holds.

    Releases memory on CUDA with sleep_mode. Each rank has an engine of its own, with one process for each of
    `tensor_parallel` devices; nothing here is collective.

    Args:
        config: options; `config.model` is the directory to load.
        device: "cpu", "cuda" or None for what the machine has.

    Raises:
        Refused: the world has no rank.
    """

    _config: SglangRolloutConfig

    def __init__(self, config: SglangRolloutConfig, device: str | None = None) -> None:
        super().__init__(config, device, world_mesh(plan(config, world_size(), None)))
        self._engine: LocalEngine | None = None
        self._asking: Asking | None = None

    def _build(self) -> Mapping[str, torch.Tensor]:
        facts, expected = read_checkpoint(self._config.model, self._config.load)
        asking = Asking.of(self._config, facts)
        self._engine = LocalEngine(self._config, facts, self._device, has_tokenizer=asking.check.has_tokenizer)
        self._asking = asking.within(self._engine.max_tokens)
        return expected

    def generate(self, prompts: TensorDict, sampling: SamplingParams, *, min_version: int | None = None) -> TensorDict:
        """See BaseRollout.generate.

        Raises:
            Refused: no valid weights, or older than min_version, or the KV cache is released; prompts that are empty,
                of another vocabulary, or that leave no room in the context or the KV cache; stop ids that the model
                doesn't have, stop strings without a tokenizer; a repetition penalty above 2, a temperature below 1e-6.
            ManymeshError: SGLang's process died, or the model gave logits that are not finite.
        """
        version = self._ready().check_can_sample(min_version)
        engine, asking = self._running()
        rows, sample = repeat_samples(read_prompts(prompts), sampling.num_samples)
        parameters = asking.parameters(rows, sampling, sample)
        replies = engine.generate(token_lists(rows["prompt_ids"]), parameters) if parameters else []
        answers = [Answer(f"row {row}", is_certain(sampling)) for row in range(len(rows))]
        deltas = [each.read(row) for each, row in zip(answers, replies, strict=True)]
        return answer(
            rows,
            [[token for delta in row for token in delta.token_ids] for row in deltas],
            [[value for delta in row for value in delta.log_probs] for row in deltas],
            [str(each.finish_reason) for each in answers],
            sampling=sampling,
            weight_version=version,
        )

    def score(self, sequences: TensorDict, *, temperature: float = 1.0, top_k: int = 0) -> TensorDict:
        """See `core.rollout.ScoringRollout.score`.

        Raises:
            Refused: the KV cache is released; a temperature below 1e-6.
            ManymeshError: SGLang's process died, or the model gave logits that are not finite.
        """
        version = self._ready().check_can_sample()
        engine, asking = self._running()
        vocab_size, longest = asking.vocab_size, asking.context
        ids = read_sequences(sequences, vocab_size=vocab_size, longest=longest, temperature=temperature, top_k=top_k)
        runs = parts(token_lists(ids), top_k)
        values = [row for part in runs for row in engine.score(part, temperature, top_k)]
        return scores(ids, values, top_k, f"weight version {version}, rank {self._mesh.rank}")

    def _running(self) -> tuple[LocalEngine, Asking]:
        if self._engine is None or self._asking is None:
            raise not_initialized()
        return self._engine, self._asking

    # -------------------------------------------------------------------------------------- weights and memory

    def _begin_load(self, specs: Sequence[WeightSpec], version: int) -> None:
        engine, _ = self._running()
        engine.begin_update()

    def _load(self, bucket: Bucket) -> None:
        engine, _ = self._running()
        engine.load(bucket)

    def _end_load(self, version: int) -> None:
        engine, _ = self._running()
        engine.end_update()
        engine.use_version(version)

    def _abort_load(self) -> None:
        engine, _ = self._running()
        with suppress(ManymeshError):  # SGLang's own update may not have begun, or have ended
            engine.end_update()

    def _check_can_release(self) -> None:
        check_sleep_mode("SGLang", self._device.type, sleep_mode=self._config.sleep_mode)

    def _release_memory(self, tags: Sequence[MemoryTag], released_tags: frozenset[MemoryTag]) -> None:
        engine, _ = self._running()
        engine.release(tags)

    def _resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        engine, _ = self._running()
        engine.resume(tags)

    def _close(self) -> None:
        engine, self._engine, self._asking = self._engine, None, None
        if engine is not None:
            engine.shutdown()
