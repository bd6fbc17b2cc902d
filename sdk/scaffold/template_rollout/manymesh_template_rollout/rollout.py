"""The rollout: plain torch, one token a step with a cache, a whole model on every rank.

It samples as it is. Put your own engine in the place of `_load_model` and `_continue`; the tests say whether the result
is still a rollout.
"""

from __future__ import annotations

import os
from inspect import signature
from typing import Any

import torch
from manymesh.parts.model_rollout import ModelRollout
from manymesh.parts.padded_rows import left_padded, trim_rows
from manymesh.parts.pretrained import load_causal_lm
from manymesh.parts.rollout_checks import stop_ids
from manymesh.parts.rollout_rows import answer_of_rows, check_prompts, no_responses, read_prompts, repeat_samples
from manymesh.parts.sampling import ResponseEnd, RowSampler, row_uniforms, stop_strings
from manymesh.parts.world_mesh import world_mesh, world_size
from tensordict import TensorDict
from transformers import DynamicCache

from core.rollout import SamplingParams

from .config import TemplateRolloutConfig
from .plan import plan


class TemplateRollout(ModelRollout):
    """Meets `core.rollout.Rollout` and `core.rollout.ReleasingRollout`.

    Versions, weight updates and memory are ModelRollout's, for a transformers model in this process. For an engine that
    holds its weights itself take manymesh.parts.base_rollout.BaseRollout, and for one that serves
    manymesh.parts.server_rollout.ServerRollout: each says which hooks you write.

    Args:
        config: options; `config.model` is the directory to load.
        device: "cpu", "cuda" or None for what the machine has.
    """

    _config: TemplateRolloutConfig

    def __init__(self, config: TemplateRolloutConfig, device: str | None = None) -> None:
        super().__init__(config, device, world_mesh(plan(config, world_size(), None)))

    def _load_model(self) -> Any:
        """Raises Refused where the directory holds no model."""
        config = self._config
        return load_causal_lm(config.model, config.dtype, config.load, attn_implementation=config.attn_implementation)

    @torch.no_grad()
    def generate(self, prompts: TensorDict, sampling: SamplingParams, *, min_version: int | None = None) -> TensorDict:
        """See core.rollout.Rollout. Sample j of the prompt with prompt_id i draws from (sampling.seed, i, j).

        Raises:
            Refused: no valid weights, or older than min_version, or the KV cache is released; prompts that are empty,
                of another vocabulary, or that leave no room in the context; stop ids or strings that the model or its
                tokenizer doesn't have.
            ManymeshError: the model gave logits that are not finite.
        """
        version = self._ready().check_can_sample(min_version)
        prompt_batch, hf = read_prompts(prompts), self._model.config
        check_prompts(prompt_batch, hf.vocab_size, hf.max_position_embeddings, sampling.max_new_tokens)
        ends = torch.tensor(stop_ids(sampling, self._eos, hf.vocab_size), dtype=torch.int64, device=self._device)
        strings = stop_strings(sampling, self._tokenizer)
        rows, sample = repeat_samples(prompt_batch, sampling.num_samples)
        uniforms = None
        if sampling.temperature:  # 0 is greedy
            seed = int.from_bytes(os.urandom(8)) if sampling.seed is None else sampling.seed
            uniforms = row_uniforms(seed, rows["prompt_id"].cpu(), sample, sampling.max_new_tokens).to(self._device)
        responses = no_responses()
        if len(rows):
            ids, mask = (each.to(self._device) for each in left_padded(rows["prompt_ids"]))
            sampler = RowSampler(sampling, ends, uniforms)
            end = ResponseEnd(ids, ends, strings, sampling.min_new_tokens)
            sequences = self._continue(ids, mask, sampler, end, sampling.max_new_tokens)
            where = f"weight version {version}, rank {self._mesh.rank}"
            responses = trim_rows(mask, sequences, sampler.log_probs, end.lengths, where)
        return answer_of_rows(rows, responses, sampling=sampling, weight_version=version)

    def _continue(
        self, ids: torch.Tensor, mask: torch.Tensor, sampler: RowSampler, end: ResponseEnd, steps: int
    ) -> torch.Tensor:
        """All rows, prompt and response, int64 (rows, width + steps taken); rows that ended early go on until all have.

        Positions count from a row's first real token, since padding stands on the left.
        """
        new = ids
        # Newer versions of transformers have renamed the argument.
        name = "cache" if "cache" in signature(self._model.forward).parameters else "past_key_values"
        past = {name: DynamicCache(config=self._model.config)}
        for _ in range(steps):
            output = self._model(
                input_ids=new,
                attention_mask=mask,
                position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :],
                use_cache=True,
                logits_to_keep=1,
                **past,
            )
            logits = output.logits[:, -1].to(torch.float32, copy=True)
            new = sampler(ids, logits).argmax(-1, keepdim=True)
            ids, mask = torch.cat([ids, new], 1), torch.cat([mask, torch.ones_like(new, dtype=torch.bool)], 1)
            if bool(end(ids, logits).all()):
                break
        return ids
