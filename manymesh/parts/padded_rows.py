"""Prompts padded on the left, to be continued column by column, and what comes of them cut to rows without padding."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from core.batch import flat
from manymesh.parts.rollout_checks import not_finite
from manymesh.parts.rollout_rows import response_rows


def left_padded(prompt_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts padded on the left with the row's own first token.

    Padding is masked out of attention, and being one of the row's own tokens it leaves the repetition penalty as it is.

    Args:
        prompt_ids: jagged, at least one row.

    Returns:
        int64 (rows, width) and the mask, bool (rows, width), False on padding.
    """
    tokens, offsets = flat(prompt_ids)
    lengths = offsets.diff()
    width = int(lengths.max())
    mask = torch.arange(width, device=tokens.device) >= width - lengths[:, None]
    ids = tokens[offsets[:-1]][:, None].repeat(1, width)
    ids[mask] = tokens
    return ids, mask


def trim_rows(
    mask: torch.Tensor, sequences: torch.Tensor, log_probs: torch.Tensor, ends: torch.Tensor, where: str = ""
) -> TensorDict:
    """Drop the padding and what was generated after a row's end.

    Args:
        mask: of left_padded.
        sequences: int64 (rows, width of prompts + steps).
        log_probs: fp32 (rows, steps).
        ends: int64 (rows), tokens of the response, 0 where no stop came.
        where: weight version and rank, for the error.

    Returns:
        rows as manymesh.parts.rollout_rows.response_rows has them.

    Raises:
        ManymeshError: a log-probability is not finite.
    """
    rows, width = mask.shape
    steps = sequences.shape[1] - width
    is_stopped = ends > 0
    ends = torch.where(is_stopped, ends, steps)
    at = torch.arange(width + steps, device=sequences.device)
    lengths = mask.sum(1)
    keep = (at >= width - lengths[:, None]) & (at < width + ends[:, None])
    padded = torch.cat([log_probs.new_zeros(rows, width), log_probs[:, :steps]], dim=1)
    reasons = ["stop" if stop else "length" for stop in is_stopped.tolist()]
    values = padded[keep]
    if not bool(values.isfinite().all()):
        raise not_finite(where)
    return response_rows(sequences[keep], (at >= width).expand_as(keep)[keep], values, lengths + ends, reasons)
