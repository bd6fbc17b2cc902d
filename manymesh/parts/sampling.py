"""Choosing tokens: one draw a row and step from a stream of its own, vectorised over rows.

For a loop over steps, or for transformers' generate, which runs greedily over what the sampler leaves: one token a row.
So transformers' own sampling, whose draws depend on which rows share a batch, is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import StopStringCriteria

from core.errors import Refused
from core.rollout import LogProbKind, SamplingParams
from manymesh.parts.rollout_checks import check_stop_strings
from manymesh.parts.row_seeds import mix, row_keys


def row_uniforms(seed: int, prompt_id: torch.Tensor, sample: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Uniforms in [0, 1) by row and step, a function of (seed, prompt_id, sample, step) alone.

    Args:
        prompt_id, sample: as manymesh.parts.row_seeds.row_keys.

    Returns:
        float64 (num_tokens, rows), on CPU.
    """
    key = row_keys(seed, prompt_id, sample)
    counter = np.arange(1, num_tokens + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    bits = mix(key[None, :] + counter[:, None])
    return torch.from_numpy((bits >> np.uint64(11)) * 2.0**-53)


def draw(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Tokens by inverse CDF.

    Args:
        probs: (rows, vocab); need not add up to exactly 1.
        uniforms: float64 (rows) in [0, 1).

    Returns:
        int64 (rows, 1); never a token of probability zero.
    """
    cdf = probs.cumsum(-1, dtype=torch.float64)
    total = cdf[:, -1:]
    # Rounding may bring uniform * total up to total, where no token is left.
    below = torch.nextafter(total, torch.zeros_like(total))
    token = torch.searchsorted(cdf, torch.minimum(uniforms[:, None] * total, below), right=True)
    return token.clamp_(max=probs.shape[-1] - 1)  # only rows with NaN need it; they are reported after the run


class RowSampler(LogitsProcessor):
    """Chooses the next token of every row and keeps its log-probability.

    Order: repetition penalty, no stop before min_new_tokens, temperature, top-k, top-p, min-p; as in transformers.

    Args:
        stop_ids: int64, the tokens that end a response; masked before min_new_tokens.
        uniforms: float64 (max_new_tokens, rows) on the model's device; None for greedy.
    """

    def __init__(self, sampling: SamplingParams, stop_ids: torch.Tensor, uniforms: torch.Tensor | None) -> None:
        self._kind = LogProbKind(sampling.log_probs)
        self._temperature = sampling.temperature
        self._uniforms = uniforms
        self._stop_ids = stop_ids
        self._min_new_tokens = sampling.min_new_tokens if len(stop_ids) else 0
        penalty = float(sampling.repetition_penalty)
        self._penalty = RepetitionPenaltyLogitsProcessor(penalty) if penalty != 1 else None
        self._truncate: list[LogitsProcessor] = []
        if sampling.top_k:
            self._truncate.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self._truncate.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p:
            self._truncate.append(MinPLogitsWarper(sampling.min_p))
        self._warm = TemperatureLogitsWarper(float(sampling.temperature)) if sampling.temperature else None
        self._chosen: list[torch.Tensor] = []

    @property
    def log_probs(self) -> torch.Tensor:
        """fp32 (rows, steps) of the tokens chosen so far."""
        return torch.cat(self._chosen, dim=1)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        step, logits = len(self._chosen), scores
        if self._penalty is not None:
            logits = self._penalty(input_ids, logits)
        if step < self._min_new_tokens:
            logits = logits.index_fill(1, self._stop_ids, -torch.inf)
        if self._uniforms is None:
            return self._greedy(scores, logits)
        is_plain = logits is scores and not self._truncate
        if self._warm is not None and self._temperature != 1:
            logits = self._warm(input_ids, logits)
        for truncate in self._truncate:
            logits = truncate(input_ids, logits)
        log_probs = logits.log_softmax(-1)
        token = draw(log_probs.exp(), self._uniforms[step])
        if self._kind is LogProbKind.PROCESSED or (
            is_plain and (self._kind is LogProbKind.TEMPERATURE or self._temperature == 1)
        ):
            self._chosen.append(log_probs.gather(1, token))
        else:
            logits_of_kind = scores if self._kind is LogProbKind.RAW else scores / self._temperature
            self._chosen.append(_log_prob(logits_of_kind, token))
        # generate hands over a copy of the model's logits, so it is ours to write to.
        return scores.fill_(-torch.inf).scatter_(1, token, 0.0)

    def _greedy(self, scores: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The distribution is a point: log-probability 0 when PROCESSED, else the model's own at temperature 1."""
        token = logits.argmax(-1, keepdim=True)
        processed = self._kind is LogProbKind.PROCESSED
        self._chosen.append(scores.new_zeros(len(scores), 1) if processed else _log_prob(scores, token))
        return logits


def _log_prob(logits: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    return logits.gather(1, token) - logits.logsumexp(-1, keepdim=True)


def stop_strings(sampling: SamplingParams, tokenizer: Callable[[], Any]) -> StopStringCriteria | None:
    """What finds the stop strings in a response; None where there are none to find.

    Args:
        tokenizer: called where there are any; see manymesh.parts.rollout_checks.load_tokenizer.

    Raises:
        Refused: an empty string, or one that no token of the tokenizer can end; what `tokenizer` raises.
    """
    if not sampling.stop:
        return None
    check_stop_strings(sampling)
    try:
        return StopStringCriteria(tokenizer(), list(sampling.stop))
    except ValueError as error:
        raise Refused("no token of the tokenizer can end the stop strings", have=list(sampling.stop)) from error


class ResponseEnd(StoppingCriteria):
    """Notes where each row's response ends: at a stop token, or where a stop string is complete.

    Only the response is searched, so that a prompt's last tokens are never part of a stop string.
    """

    def __init__(
        self, prompts: torch.Tensor, stop_ids: torch.Tensor, strings: StopStringCriteria | None, min_new_tokens: int
    ) -> None:
        self._width, self._stop_ids, self._strings = prompts.shape[1], stop_ids, strings
        self._min_new_tokens = min_new_tokens
        self.lengths = prompts.new_zeros(len(prompts))  # tokens of the response, 0 while it is open

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        num_tokens = input_ids.shape[1] - self._width
        ends = (input_ids[:, -1:] == self._stop_ids).any(1)
        if self._strings is not None and num_tokens >= self._min_new_tokens:
            ends |= self._strings(input_ids[:, self._width :], scores)
        self.lengths.masked_fill_(ends & (self.lengths == 0), num_tokens)
        return self.lengths > 0
