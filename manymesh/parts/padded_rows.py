"""Prompts padded on the left, to be continued column by column, and what comes of them cut to rows without padding."""

from __future__ import annotations

import attrs
import torch

from core.errors import ManymeshError
from manymesh.parts.rollout_rows import Prompts, Responses


@attrs.frozen
class PaddedPrompts:
    """Prompts padded on the left with the row's own first token.

    Padding is masked out of attention, and being one of the row's own tokens it leaves the repetition penalty as it is.

    Attributes:
        ids: int64 (rows, width).
        lengths: int64 (rows).
    """

    ids: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of(cls, prompts: Prompts) -> PaddedPrompts:
        tokens, lengths = prompts.tokens, prompts.lengths
        if not len(lengths):
            return cls(tokens.new_zeros(0, 0), lengths)
        width = int(lengths.max())
        mask = torch.arange(width, device=tokens.device) >= width - lengths[:, None]
        ids = tokens[lengths.cumsum(0) - lengths][:, None].repeat(1, width)
        ids[mask] = tokens
        return cls(ids, lengths)

    def take(self, start: int, stop: int) -> PaddedPrompts:
        """Rows start..stop-1, no wider than their longest prompt."""
        lengths = self.lengths[start:stop]
        width = int(lengths.max())
        return PaddedPrompts(self.ids[start:stop, self.ids.shape[1] - width :], lengths)

    def to(self, device: torch.device) -> PaddedPrompts:
        return PaddedPrompts(self.ids.to(device), self.lengths.to(device))

    @property
    def mask(self) -> torch.Tensor:
        """bool (rows, width), False on padding."""
        width = self.ids.shape[1]
        return torch.arange(width, device=self.ids.device) >= width - self.lengths[:, None]


def cut(
    prompts: PaddedPrompts, sequences: torch.Tensor, log_probs: torch.Tensor, ends: torch.Tensor, where: str = ""
) -> Responses:
    """Drop the padding and what was generated after a row's end.

    Args:
        sequences: int64 (rows, width of prompts + steps).
        log_probs: fp32 (rows, steps).
        ends: int64 (rows), tokens of the response, 0 where no stop came.
        where: weight version and rank, for the error.

    Raises:
        ManymeshError: a log-probability is not finite.
    """
    rows, width = prompts.ids.shape
    steps = sequences.shape[1] - width
    stopped = ends > 0
    ends = torch.where(stopped, ends, steps)
    at = torch.arange(width + steps, device=sequences.device)
    keep = (at >= width - prompts.lengths[:, None]) & (at < width + ends[:, None])
    padded = torch.cat([log_probs.new_zeros(rows, width), log_probs[:, :steps]], dim=1)
    reasons = tuple("stop" if stop else "length" for stop in stopped.tolist())
    mask = (at >= width).expand_as(keep)[keep]
    chosen = padded[keep]
    if not bool(chosen.isfinite().all()):
        raise ManymeshError(
            "the model gave logits that are not finite",
            where=where,
            mend="look at the last weight update: parameters may be NaN or infinite",
        )
    return Responses(sequences[keep], mask, chosen, prompts.lengths + ends, reasons)
