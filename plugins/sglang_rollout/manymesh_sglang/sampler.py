"""Takes the place of SGLang's sampler: one stream of randomness a row, and log-probabilities of each row's own kind.

Runs inside SGLang's scheduler, which imports it by manymesh_sglang.scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from sglang.srt.layers.logprob_processor import LogprobResult
from sglang.srt.layers.sampler import Sampler

from core.rollout import LogProbKind
from manymesh_sglang.draw import draw, log_prob, row_keys, truncated
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
            processed = logits / temperatures
            if truncates(sampling_info):
                processed, plain = truncated(processed, *asked_truncation(sampling_info)), False
            tokens = drawing(processed.is_cuda)(processed, row_keys(stream, positions))
        if return_logprob:
            logits_of_kind = untouched / torch.where(kind[:, None] == RAW, 1.0, temperatures)
            values = log_prob(logits_of_kind, tokens)
            if processed is None:
                values = torch.where(kind == PROCESSED, 0.0, values)
            elif not plain:  # else PROCESSED is TEMPERATURE
                values = torch.where(kind == PROCESSED, log_prob(processed, tokens), values)
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


@cache
def drawing(on_cuda: bool) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """`draw`; on CUDA by a kernel that passes over the logits once, where there is Triton."""
    if not on_cuda:
        return draw
    try:
        from manymesh_sglang.draw_kernel import draw_in_one_pass
    except ImportError:
        return draw
    return draw_in_one_pass


def truncates(sampling_info: Any) -> bool:
    """Whether any row asks for it; known on the host."""
    return bool(
        sampling_info.need_top_k_sampling or sampling_info.need_top_p_sampling or sampling_info.need_min_p_sampling
    )


def asked_truncation(sampling_info: Any) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """top_ks, top_ps, min_ps (rows); None where no row asks for it."""
    return (
        sampling_info.top_ks if sampling_info.need_top_k_sampling else None,
        sampling_info.top_ps if sampling_info.need_top_p_sampling else None,
        sampling_info.min_ps if sampling_info.need_min_p_sampling else None,
    )
