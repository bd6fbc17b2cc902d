"""What rollouts around engines of other projects ask of requests before anything runs."""

from __future__ import annotations

import attrs
from tensordict import TensorDict

from core.rollout import LogProbKind, SamplingParams
from manymesh.parts.rollout_checks import check_stop_strings, eos_ids, has_tokenizer, load_tokenizer, stop_ids
from manymesh.parts.rollout_rows import check_prompts


@attrs.frozen
class RequestCheck:
    """What requests are checked against, by the model's directory.

    Attributes:
        eos: tokens that end a text.
        has_tokenizer: whether stop strings can be found.
    """

    model: str
    eos: tuple[int, ...]
    has_tokenizer: bool

    @classmethod
    def of(cls, model: str) -> RequestCheck:
        return cls(model, eos_ids(model), has_tokenizer(model))

    def stop_ids(self, prompts: TensorDict, sampling: SamplingParams, vocab_size: int, context: int) -> list[int]:
        """All tokens that end a response, sorted, where the request can be sampled.

        Args:
            prompts: of read_prompts.
            context: tokens of prompt and response together.

        Raises:
            Refused: prompts of another vocabulary, or that leave no room for a response; stop ids that the model
                doesn't have; an empty stop string, or any without a tokenizer.
        """
        check_prompts(prompts, vocab_size, context, sampling.max_new_tokens)
        ids = stop_ids(sampling, self.eos, vocab_size)
        check_stop_strings(sampling)
        if sampling.stop and not self.has_tokenizer:
            load_tokenizer(self.model)  # says what is missing
        return ids


def is_certain(sampling: SamplingParams) -> bool:
    """Whether sampled tokens have log-probability 0: with temperature 0, when PROCESSED."""
    return sampling.temperature == 0 and LogProbKind(sampling.log_probs) is LogProbKind.PROCESSED
