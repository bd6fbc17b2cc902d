"""Takes the place of SGLang's sampler: one stream of randomness a row, and log-probabilities of each row's own kind.

Runs inside SGLang's scheduler, which imports it by manymesh_sglang.scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.logprob_processor import LogprobResult
from sglang.srt.layers.sampler import Sampler

from core.rollout import LogProbKind
from manymesh_sglang.sampler_protocol import KINDS

RAW, TEMPERATURE, PROCESSED = (KINDS.index(kind) for kind in LogProbKind)


class RowSampler(Sampler):
    """Takes the place of SGLang's sampler. What a row draws is a function of its seed and its tokens' places alone.

    `sampling_info.sampling_seed` is made by manymesh_sglang.scheduler: a seed, and in its last two bits the kind.
    """

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: Sequence[int],
        token_ids_logprobs: Sequence[Any],
        positions: torch.Tensor,
        **_: Any,
    ) -> torch.Tensor:
        logits: torch.Tensor = self._preprocess_logits(logits_output.next_token_logits, sampling_info).float()
        untouched = sampling_info.__dict__.pop("manymesh_untouched", None)  # by penalties
        plain = untouched is None
        untouched = logits if plain else untouched.float()
        temperatures = sampling_info.temperatures
        stream, kind = sampling_info.sampling_seed >> 2, sampling_info.sampling_seed & 3
        if sampling_info.is_all_greedy:
            tokens = logits.argmax(-1)
            processed = None
        else:
            tempered = logits / temperatures
            truncated_logits = truncated(tempered, sampling_info)
            plain = plain and truncated_logits is tempered
            processed = truncated_logits.log_softmax(-1)
            tokens = draw(processed.exp(), uniforms(stream, positions))
        if return_logprob:
            at = tokens[:, None]
            scale = torch.where(kind[:, None] == RAW, 1.0, temperatures)
            logits_of_kind = untouched / scale
            values = logits_of_kind.gather(1, at)[:, 0] - logits_of_kind.logsumexp(-1)
            certain = torch.zeros_like(values) if processed is None else processed.gather(1, at)[:, 0]
            values = torch.where(kind == PROCESSED, certain, values)
            result = LogprobResult(token_logprobs=values)
            if any(top_logprobs_nums) or any(each is not None for each in token_ids_logprobs):  # others' requests
                result = self.output_logprob_processor.compute_logprobs(
                    logits_of_kind.log_softmax(-1), list(top_logprobs_nums), list(token_ids_logprobs), tokens
                )
                result.token_logprobs = values
            result.write_output_to(logits_output)
        tokens = tokens.int()
        self._sync_token_ids_across_tp(tokens, sampling_info)
        return tokens


def truncated(logits: torch.Tensor, sampling_info: Any) -> torch.Tensor:
    """Top-k, then top-p, then min-p, as transformers has it; -inf where a token is out. The argument itself where no
    row asks for any of them."""
    has_k, has_p = sampling_info.need_top_k_sampling, sampling_info.need_top_p_sampling
    if has_k or has_p:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        ranks = torch.arange(logits.shape[-1], device=logits.device)
        ordered = ordered.masked_fill(ranks >= sampling_info.top_ks[:, None], -torch.inf)
        if has_p:
            probs = ordered.softmax(-1)
            before = probs.cumsum(-1) - probs
            whole = sampling_info.top_ps[:, None] >= 1  # not by rounding: these rows lose no token
            ordered = ordered.masked_fill((before >= sampling_info.top_ps[:, None]) & ~whole, -torch.inf)
        logits = torch.empty_like(ordered).scatter_(-1, order, ordered)
    if sampling_info.need_min_p_sampling:
        floor = logits.amax(-1, keepdim=True) + sampling_info.min_ps[:, None].log()  # log 0 is -inf: none below
        logits = logits.masked_fill(logits < floor, -torch.inf)
    return logits


def draw(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Tokens (rows) by inverse CDF; never one of probability zero."""
    cdf = probs.cumsum(-1, dtype=torch.float64)
    total = cdf[:, -1:]
    # Rounding may bring uniform * total up to total, where no token is left.
    below = torch.nextafter(total, torch.zeros_like(total))
    tokens = torch.searchsorted(cdf, torch.minimum(uniforms[:, None] * total, below), right=True)
    return tokens[:, 0].clamp_(max=probs.shape[-1] - 1)  # only rows with NaN need it; their log-probability says so


def uniforms(stream: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """float64 (rows) in [0, 1): SplitMix64 (Steele, Lea, Flood 2014) of the row's seed at its token's place.

    In int64, which wraps as uint64 does; its shifts carry the sign, which is masked away.
    """
    x = stream + (positions.to(torch.int64) + 1) * GOLDEN
    x = (x ^ ((x >> 30) & MASK_30)) * MIX_1
    x = (x ^ ((x >> 27) & MASK_27)) * MIX_2
    x = x ^ ((x >> 31) & MASK_31)
    return ((x >> 11) & MASK_11).double() * 2.0**-53


def _signed(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits


GOLDEN, MIX_1, MIX_2 = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
MASK_30, MASK_27, MASK_31, MASK_11 = ((1 << (64 - shift)) - 1 for shift in (30, 27, 31, 11))
