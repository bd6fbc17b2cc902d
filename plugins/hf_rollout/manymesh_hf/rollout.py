"""Rollout with transformers' generate: a whole copy of the weights on every rank, no server, no extra process."""

from __future__ import annotations

import os
from typing import Any

import torch
from tensordict import TensorDict
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria

from core.batch import concat, take
from core.rollout import SamplingParams
from manymesh.parts.model_rollout import ModelRollout
from manymesh.parts.padded_rows import left_padded, trim_rows
from manymesh.parts.pretrained import load_causal_lm
from manymesh.parts.rollout_checks import stop_ids
from manymesh.parts.rollout_rows import answer_of_rows, check_prompts, no_responses, read_prompts, repeat_samples
from manymesh.parts.sampling import ResponseEnd, RowSampler, row_uniforms, stop_strings
from manymesh.parts.scoring import read_sequences, scored
from manymesh.parts.world_mesh import world_mesh, world_size
from manymesh_hf.config import HfRolloutConfig
from manymesh_hf.plan import plan
from manymesh_hf.scoring import score


class HfRollout(ModelRollout):
    """`core.rollout.ScoringRollout` over transformers.

    Args:
        config: options; `config.model` is the directory to load.
        device: "cpu", "cuda" or None for what the machine has.
    """

    _config: HfRolloutConfig

    def __init__(self, config: HfRolloutConfig, device: str | None = None) -> None:
        super().__init__(config, device, world_mesh(plan(config, world_size(), None)))

    def _load_model(self) -> Any:
        """Raises Refused where no checkpoint is there, it lacks weights, or transformers cannot load it as a causal
        language model."""
        config = self._config
        model = load_causal_lm(config.model, config.dtype, config.load, attn_implementation=config.attn_implementation)
        # generate fills what a call leaves open from here: a checkpoint's top_k or penalties must not slip in.
        model.generation_config = GenerationConfig()
        return model

    def generate(self, prompts: TensorDict, sampling: SamplingParams, *, min_version: int | None = None) -> TensorDict:
        """See BaseRollout.generate.

        Raises:
            Refused: no valid weights, or older than min_version, or the KV cache is released; prompts that are empty,
                of another vocabulary, or that leave no room in the context; stop ids or strings that the model or its
                tokenizer doesn't have.
            ManymeshError: the model gave logits that are not finite.
        """
        version = self._ready().check_can_sample(min_version)
        prompt_batch = read_prompts(prompts)
        config = self._model.config.get_text_config(decoder=True)
        context = getattr(config, "max_position_embeddings", None)
        check_prompts(prompt_batch, config.vocab_size, context, sampling.max_new_tokens)
        ends = torch.tensor(stop_ids(sampling, self._eos, config.vocab_size), dtype=torch.int64, device=self._device)
        strings = stop_strings(sampling, self._tokenizer)
        rows, sample = repeat_samples(prompt_batch, sampling.num_samples)
        uniforms = None
        if sampling.temperature:
            seed = int.from_bytes(os.urandom(8)) if sampling.seed is None else sampling.seed
            uniforms = row_uniforms(seed, rows["prompt_id"].cpu(), sample, sampling.max_new_tokens)
        step = self._config.max_batch_rows or max(len(rows), 1)
        parts = [
            self._run(
                take(rows, [(start, min(start + step, len(rows)))])["prompt_ids"],
                None if uniforms is None else uniforms[:, start : start + step],
                sampling,
                ends,
                strings,
            )
            for start in range(0, len(rows), step)
        ]
        responses = concat(parts) if parts else no_responses()
        return answer_of_rows(rows, responses, sampling=sampling, weight_version=version)

    def _run(
        self,
        prompt_ids: torch.Tensor,
        uniforms: torch.Tensor | None,
        sampling: SamplingParams,
        stop_ids: torch.Tensor,
        strings: StopStringCriteria | None,
    ) -> TensorDict:
        """One call of generate over all rows of `prompt_ids`."""
        ids, mask = (each.to(self._device) for each in left_padded(prompt_ids))
        sampler = RowSampler(sampling, stop_ids, None if uniforms is None else uniforms.to(self._device))
        end = ResponseEnd(ids, stop_ids, strings, sampling.min_new_tokens)
        # No eos here: `end` knows all stops, and rows that go on behind theirs are cut.
        sequences = self._model.generate(
            ids,
            attention_mask=mask,
            generation_config=GenerationConfig(do_sample=False, max_new_tokens=sampling.max_new_tokens),
            logits_processor=LogitsProcessorList([sampler]),
            stopping_criteria=StoppingCriteriaList([end]),
        )
        where = f"weight version {self.weight_version}, rank {self._mesh.rank}"
        return trim_rows(mask, sequences, sampler.log_probs, end.lengths, where)

    def score(self, sequences: TensorDict, *, temperature: float = 1.0, top_k: int = 0) -> TensorDict:
        """See `core.rollout.ScoringRollout.score`. Logits of a step take 512 MiB at most, whatever is scored.

        Raises:
            ManymeshError: the model gave logits that are not finite.
        """
        version = self._ready().check_can_sample()
        config = self._model.config.get_text_config(decoder=True)
        longest = getattr(config, "max_position_embeddings", None)
        ids = read_sequences(
            sequences, vocab_size=config.vocab_size, longest=longest, temperature=temperature, top_k=top_k
        )
        log_probs, *top = score(self._model, ids, config.vocab_size, temperature, top_k)
        where = f"weight version {version}, rank {self._mesh.rank}"
        return scored(ids, log_probs, (top[0], top[1]) if top_k else None, where)
