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
from manymesh.parts.rollout_checks import check_stop_strings, eos_ids, has_tokenizer, load_tokenizer, stop_ids
from manymesh.parts.rollout_rows import check_prompts
from manymesh.parts.row_seeds import row_keys
from manymesh_sglang import sampling as sglang_sampling
from manymesh_sglang.arguments import context
from manymesh_sglang.config import SglangRolloutConfig
from manymesh_sglang.sampler_protocol import SEED_BITS


@attrs.frozen
class Asking:
    """What requests are checked against.

    Attributes:
        context: tokens of prompt and response together.
    """

    model: str
    vocab_size: int
    context: int
    eos: tuple[int, ...]
    has_tokenizer: bool

    @classmethod
    def of(cls, config: SglangRolloutConfig, facts: ModelFacts) -> Asking:
        """Raises Refused where config.json doesn't say how large the vocabulary is."""
        vocab_size = facts.vocab_size
        if vocab_size is None:
            raise Refused("config.json has no vocab_size", where=facts.path, mend="choose another rollout")
        return cls(facts.path, vocab_size, context(config, facts), eos_ids(facts.path), has_tokenizer(facts.path))

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
        check_prompts(prompts, self.vocab_size, self.context, sampling.max_new_tokens)
        sglang_sampling.check(sampling)
        ends = stop_ids(sampling, self.eos, self.vocab_size)
        check_stop_strings(sampling)
        if sampling.stop and not self.has_tokenizer:
            load_tokenizer(self.model)  # says what is missing
        seeds: Sequence[int | None] = [None] * len(prompts)
        if sampling.seed is not None:
            seeds = (row_keys(sampling.seed, prompts["prompt_id"].cpu(), sample) >> (64 - SEED_BITS)).tolist()
        return [sglang_sampling.request(sampling, ends, seed) for seed in seeds]


def may_release(config: SglangRolloutConfig, device: torch.device) -> None:
    """Raises Refused where SGLang would free nothing."""
    if device.type == "cpu" or not config.sleep_mode:
        raise Refused(
            "this rollout cannot give its memory back",
            have="SGLang frees nothing on CPU, and on CUDA only with sleep_mode",
            mend="turn release_after_generate off, or set sleep_mode on CUDA",
        )
