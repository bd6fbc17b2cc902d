"""Rollout with transformers' generate: a whole copy of the weights on every rank, no server, no extra process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from tensordict import TensorDict
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria

from core.device import choose_device
from core.engine import WeightSpec
from core.mesh import RankMesh
from core.rollout import LogProbKind, MemoryTag, SamplingParams
from manymesh.parts.padded_rows import PaddedPrompts, cut
from manymesh.parts.pretrained import load_causal_lm
from manymesh.parts.rollout_checks import check_tags, eos_ids, load_tokenizer, not_initialized, stop_ids, valid_version
from manymesh.parts.rollout_rows import Prompts, Responses
from manymesh.parts.sampling import ResponseEnd, RowSampler, row_uniforms, stop_strings
from manymesh.parts.versioned_weights import VersionedWeights
from manymesh.parts.world_mesh import world_mesh, world_size
from manymesh_hf.config import HfRolloutConfig
from manymesh_hf.plan import plan


class HfRollout:
    """`core.rollout.Rollout` over transformers.

    Versions: 0 after `initialize()`, the update's version after `finish_weight_update()`, None in between, after a
    failed update and after `release(["weights"])`, until a whole update was loaded.

    Args:
        config: options; `config.model` is the directory to load.
        device: "cpu", "cuda" or None for what the machine has.
    """

    def __init__(self, config: HfRolloutConfig, device: str | None = None) -> None:
        self._config = config
        self._device = choose_device(device, int(os.environ.get("LOCAL_RANK", "0")))
        self._mesh = world_mesh(plan(config, world_size(), None))
        self._model: Any = None
        self._tokenizer = cache(lambda: load_tokenizer(config.model))
        self._eos: tuple[int, ...] = ()
        self._weights: VersionedWeights | None = None

    @property
    def mesh(self) -> RankMesh:
        return self._mesh

    @property
    def weight_version(self) -> int | None:
        return self._weights.version if self._weights else None

    def initialize(self) -> None:
        """Load the directory's weights, which are version 0.

        Raises:
            Refused: no checkpoint is there, it lacks weights, or transformers cannot load it as a causal language
                model.
        """
        model = load_causal_lm(
            self._config.model, self._config.dtype, attn_implementation=self._config.attn_implementation
        )
        self._eos = eos_ids(self._config.model)
        # generate fills what a call leaves open from here: a checkpoint's top_k or penalties must not slip in.
        model.generation_config = GenerationConfig()
        self._model = model.requires_grad_(False).to(self._device)
        self._weights = VersionedWeights(self._model)

    def generate(self, prompts: TensorDict, sampling: SamplingParams, *, min_version: int | None = None) -> TensorDict:
        """See `core.rollout.Rollout.generate`. Columns come back on the device of prompt_ids.

        Sample j of the prompt with prompt_id i (its row number where there is no such column) draws from
        (sampling.seed, i, j); without a seed, from fresh entropy. With temperature 0, log-probabilities RAW and
        TEMPERATURE are those of the untempered model, PROCESSED are 0, and the metadata `temperature` is 1.

        Raises:
            Refused: no valid weights, or older than min_version; prompts that are empty, of another vocabulary, or that
                leave no room in the context; stop ids or strings that the model or its tokenizer doesn't have.
            ManymeshError: the model gave logits that are not finite.
        """
        version = self._weights.valid(min_version) if self._weights else valid_version(None, None, "not initialized")
        table = Prompts.read(prompts)
        config = self._model.config.get_text_config(decoder=True)
        context = getattr(config, "max_position_embeddings", None)
        table.check(config.vocab_size, context, sampling.max_new_tokens)
        ends = torch.tensor(stop_ids(sampling, self._eos, config.vocab_size), dtype=torch.int64, device=self._device)
        strings = stop_strings(sampling, self._tokenizer)
        sample = torch.arange(sampling.num_samples).repeat(len(table))
        table = table.repeat(sampling.num_samples)
        uniforms = None
        if sampling.temperature:
            seed = int.from_bytes(os.urandom(8)) if sampling.seed is None else sampling.seed
            uniforms = row_uniforms(seed, table.prompt_id.cpu(), sample, sampling.max_new_tokens)
        padded = PaddedPrompts.of(table)
        step = self._config.max_batch_rows or max(len(table), 1)
        parts = [
            self._run(
                padded.take(start, min(start + step, len(table))),
                None if uniforms is None else uniforms[:, start : start + step],
                sampling,
                ends,
                strings,
            )
            for start in range(0, len(table), step)
        ]
        return Responses.concat(parts or [Responses.none()]).batch(
            table,
            weight_version=version,
            temperature=sampling.temperature or 1.0,
            log_prob_kind=LogProbKind(sampling.log_probs).value,
        )

    def _run(
        self,
        prompts: PaddedPrompts,
        uniforms: torch.Tensor | None,
        sampling: SamplingParams,
        stop_ids: torch.Tensor,
        strings: StopStringCriteria | None,
    ) -> Responses:
        """One call of generate over all rows of `prompts`."""
        prompts = prompts.to(self._device)
        sampler = RowSampler(sampling, stop_ids, None if uniforms is None else uniforms.to(self._device))
        end = ResponseEnd(prompts.ids, stop_ids, strings, sampling.min_new_tokens)
        # No eos here: `end` knows all stops, and rows that go on behind theirs are cut.
        sequences = self._model.generate(
            prompts.ids,
            attention_mask=prompts.mask,
            generation_config=GenerationConfig(do_sample=False, max_new_tokens=sampling.max_new_tokens),
            logits_processor=LogitsProcessorList([sampler]),
            stopping_criteria=StoppingCriteriaList([end]),
        )
        where = f"weight version {self.weight_version}, rank {self._mesh.rank}"
        return cut(prompts, sequences, sampler.log_probs, end.lengths, where)

    def release(self, tags: Sequence[MemoryTag]) -> None:
        """Free memory.

        "weights": the parameters are dropped on any device, not moved; weight_version is None until they are resumed
        and a whole update was loaded. Buffers (rotary tables) stay. "kv_cache": the cache lives no longer than a call
        of generate, so there is none to drop. On CUDA either gives the allocator's free blocks back to the device.
        """
        weights = self._loaded()
        check_tags(tags)
        if "weights" in tags:
            weights.release()
        self._empty_cache()

    def resume(self, tags: Sequence[MemoryTag]) -> None:
        """Take memory again. Weights hold garbage then, so that weight_version stays None until a whole update."""
        weights = self._loaded()
        check_tags(tags)
        if "weights" in tags:
            weights.resume()

    def begin_weight_update(self, specs: Sequence[WeightSpec], version: int) -> None:
        """See `core.rollout.Rollout`; raises as manymesh.parts.versioned_weights."""
        self._loaded().begin(specs, version)

    def load_bucket(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._loaded().load(bucket)

    def finish_weight_update(self) -> None:
        self._loaded().finish()

    def abort_weight_update(self) -> None:
        """Forget the update. Weights are written in place: if a bucket has come, weight_version stays None."""
        self._loaded().abort()

    def _loaded(self) -> VersionedWeights:
        if self._weights is None:
            raise not_initialized()
        return self._weights

    def shutdown(self) -> None:
        """Let go of the model; `initialize()` may load it again."""
        self._model = self._weights = None
        self._empty_cache()

    def _empty_cache(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
