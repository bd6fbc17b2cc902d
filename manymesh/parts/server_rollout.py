"""What rollouts that are servers have in common: requests, pauses, and weight updates while requests run.

A backend's rollout subclasses ServerRollout, or ReleasingServerRollout where its engine gives memory back.
"""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, cast

import torch
from tensordict import TensorDict

from core.config import RolloutConfig
from core.engine import WeightSpec
from core.errors import Refused
from core.mesh import RankMesh
from core.rollout import GenerationDelta, MemoryTag, PauseMode, SamplingParams
from manymesh.parts.base_rollout import BaseReleasingRollout, BaseRollout, Bucket
from manymesh.parts.rollout_checks import not_initialized
from manymesh.parts.rollout_rows import read_prompts, repeat_samples, token_lists
from manymesh.parts.scoring import parts, read_sequences, scores
from manymesh.parts.server_engine import ReleasingServerEngine, ServerEngine
from manymesh.parts.server_rows import one_prompt, server_batch


class ServerRollout(BaseRollout):
    """`core.rollout.RolloutServer` over a ServerEngine.

    A weight update pauses what runs, in whatever thread it is called, and lets it go on with the new weights. Methods
    may be called from several threads, those of an update from one.

    Args: as BaseRollout.
    """

    def __init__(self, config: RolloutConfig, device: str | None, mesh: RankMesh) -> None:
        super().__init__(config, device, mesh)
        self._engine: ServerEngine | None = None
        self._paused = self._asked_to_pause = False

    # ------------------------------------------------------------------------------------- what a backend does

    @abstractmethod
    def _start(self) -> tuple[ServerEngine, Mapping[str, torch.Tensor]]:
        """The engine with the directory's weights, and what save_pretrained would write of them, by name."""

    @abstractmethod
    def _requests(
        self, prompts: TensorDict, sampling: SamplingParams, sample: torch.Tensor, request_ids: Sequence[str]
    ) -> list[Any]:
        """By row of read_prompts, for the engine. Raises Refused for what cannot be sampled."""

    @abstractmethod
    def _score_limits(self) -> tuple[int, int]:
        """Size of the vocabulary, and tokens of the longest sequence that can be scored."""

    # ---------------------------------------------------------------------------------------------- requests

    def _build(self) -> Mapping[str, torch.Tensor]:
        self._engine, expected = self._start()
        self._paused = self._asked_to_pause = False
        return expected

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        prompt_id: int = 0,
        sample: int = 0,
    ) -> AsyncIterator[GenerationDelta]:
        """See `core.rollout.RolloutServer`. May be awaited on any event loop; closing it aborts the request.

        Raises:
            Refused: as generate, or num_samples is not 1.
        """
        version = self._ready().check_can_sample()
        prompt = one_prompt(prompt_ids, sampling, prompt_id)
        [request] = self._requests(prompt, sampling, torch.tensor([sample]), [request_id or secrets.token_hex(8)])
        return self._running().stream(request, version)

    def generate(self, prompts: TensorDict, sampling: SamplingParams, *, min_version: int | None = None) -> TensorDict:
        """See `core.rollout.Rollout.generate`. Rows are in order, whichever ends first.

        Adds the column weight_versions, see `core.rollout.RolloutServer`. Rows that are aborted meanwhile come back
        as far as they were sampled.

        Raises:
            Refused: no valid weights, or older than min_version, or the KV cache is released; generation is paused;
                what cannot be sampled.
            ManymeshError: the engine died, or the model gave logits that are not finite.
        """
        version = self._ready().check_can_sample(min_version)
        self._check_not_paused("generate")
        engine = self._running()
        rows, sample = repeat_samples(read_prompts(prompts), sampling.num_samples)
        requests = self._requests(rows, sampling, sample, [secrets.token_hex(8) for _ in range(len(rows))])
        answers = engine.call(engine.answers(requests, version)) if requests else []
        return server_batch(rows, answers, sampling, version)

    def score(self, sequences: TensorDict, *, temperature: float = 1.0, top_k: int = 0) -> TensorDict:
        """See `core.rollout.ScoringRollout.score`. All rows are of one version: after a weight update in the midst they
        are scored again with the new weights.

        Raises:
            Refused: generation is paused.
            ManymeshError: the engine died, or the model gave logits that are not finite.
        """
        vocab_size, longest = self._score_limits()
        ids = read_sequences(sequences, vocab_size=vocab_size, longest=longest, temperature=temperature, top_k=top_k)
        rows = token_lists(ids)
        while True:
            version, engine = self._ready().check_can_sample(), self._running()
            self._check_not_paused("score")
            values = [
                row for part in parts(rows, top_k) for row in engine.call(engine.scores(part, temperature, top_k))
            ]
            if self.weight_version == version:
                return scores(ids, values, top_k, f"weight version {version}, rank {self._mesh.rank}")

    def _check_not_paused(self, method: str) -> None:
        if self._asked_to_pause:
            raise Refused(f"generation is paused, so that {method} would wait for ever", mend="resume_generation()")

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """See `core.rollout.RolloutServer`."""
        engine = self._running()
        await engine.there(engine.abort(request_ids))

    async def pause(self, mode: PauseMode) -> None:
        """See `core.rollout.RolloutServer`. Raises Refused for an unknown mode."""
        if mode not in ("keep", "wait", "abort"):
            raise Refused("unknown mode of pause", have=mode, want="keep, wait or abort")
        engine = self._running()
        self._asked_to_pause = self._paused = True
        await engine.there(engine.pause(mode))

    async def resume_generation(self) -> None:
        """Let requests go on. Raises Refused while there are no valid weights: a weight update resumes by itself."""
        self._ready().check_valid()
        engine = self._running()
        await engine.there(engine.resume())
        self._asked_to_pause = self._paused = False

    async def check_health(self) -> None:
        """Raises ManymeshError where the engine will never answer again."""
        engine = self._running()
        await engine.there(engine.check_health())

    def _running(self) -> ServerEngine:
        if self._engine is None:
            raise not_initialized()
        return self._engine

    # ----------------------------------------------------------------------------------------------- weights

    def _is_staged(self) -> bool:
        return self._running().is_staged

    def _begin_load(self, specs: Sequence[WeightSpec], version: int) -> None:
        engine = self._running()
        engine.call(engine.begin_load(specs, version))

    def _load(self, bucket: Bucket) -> None:
        engine = self._running()
        engine.call(engine.load(bucket))

    def _end_load(self, version: int) -> None:
        engine = self._running()
        engine.call(engine.end_load(version))

    def _abort_load(self) -> None:
        engine = self._running()
        engine.call(engine.abort_load())

    def begin_weight_update(self, specs: Sequence[WeightSpec], version: int) -> None:
        """See BaseRollout. Requests that run are kept, and wait."""
        super().begin_weight_update(specs, version)
        if not self._paused:
            engine = self._running()
            engine.call(engine.pause("keep"))
            self._paused = True

    def finish_weight_update(self) -> None:
        """See BaseRollout. Requests go on with the new weights, unless they were paused before."""
        super().finish_weight_update()
        self._go_on()

    def abort_weight_update(self) -> None:
        """See BaseRollout. Requests go on where the old weights are whole; else they are aborted, and what was sampled
        of them is kept."""
        weights = self._weights
        if weights is None or not weights.is_updating:
            return
        super().abort_weight_update()
        if weights.version is not None:
            self._go_on()
        else:
            self._abort_requests()

    def _abort_requests(self) -> None:
        engine = self._running()
        engine.call(engine.abort(None))

    def _go_on(self) -> None:
        if self._paused and not self._asked_to_pause:
            engine = self._running()
            engine.call(engine.resume())
            self._paused = False

    def _close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()


class ReleasingServerRollout(BaseReleasingRollout, ServerRollout):
    """A ServerRollout over a ReleasingServerEngine. A release aborts what runs, before its memory goes."""

    def _release_memory(self, tags: Sequence[MemoryTag], released_tags: frozenset[MemoryTag]) -> None:
        self._abort_requests()
        engine = cast(ReleasingServerEngine, self._running())
        engine.call(engine.release(tags, released_tags))

    def _resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        engine = cast(ReleasingServerEngine, self._running())
        engine.call(engine.resume_memory(tags))
