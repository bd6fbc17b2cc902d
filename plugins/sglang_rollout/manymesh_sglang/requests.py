"""From a table of prompts to SGLang's parameters by row, once it is known that they can be sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from tensordict import TensorDict

from core.errors import Refused
from core.manifest import ModelFacts
from core.rollout import SamplingParams
from manymesh.parts.requests import RequestCheck
from manymesh.parts.row_seeds import row_keys
from manymesh_sglang import sampling as sglang_sampling
from manymesh_sglang.config import SglangRolloutConfig, context
from manymesh_sglang.sampler_protocol import SEED_BITS


@attrs.frozen
class Asking:
    """What requests are checked against.

    Attributes:
        context: tokens of prompt and response together.
    """

    check: RequestCheck
    vocab_size: int
    context: int

    @classmethod
    def of(cls, config: SglangRolloutConfig, facts: ModelFacts) -> Asking:
        """Raises Refused where config.json doesn't say how large the vocabulary is."""
        vocab_size = facts.vocab_size
        if vocab_size is None:
            raise Refused("config.json has no vocab_size", where=facts.path, mend="choose another rollout")
        return cls(RequestCheck.of(facts.path), vocab_size, context(config, facts))

    def within(self, kv_cache_tokens: int) -> Asking:
        """A request that the KV cache doesn't hold would be cut short by SGLang."""
        return attrs.evolve(self, context=min(self.context, kv_cache_tokens))

    def parameters(self, prompts: TensorDict, sampling: SamplingParams, sample: torch.Tensor) -> list[dict[str, Any]]:
        """By row of read_prompts.

        Args:
            sample: int64 (rows): each row's number among those of its prompt.

        Raises:
            Refused: what cannot be sampled.
        """
        sglang_sampling.check(sampling)
        ends = self.check.stop_ids(prompts, sampling, self.vocab_size, self.context)
        seeds: Sequence[int | None] = [None] * len(prompts)
        if sampling.seed is not None:
            seeds = (row_keys(sampling.seed, prompts["prompt_id"].cpu(), sample) >> (64 - SEED_BITS)).tolist()
        return [sglang_sampling.request(sampling, ends, seed) for seed in seeds]
