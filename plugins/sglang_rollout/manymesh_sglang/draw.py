"""Which token a row draws, and from which tokens. Needs torch alone.

A row draws the token whose logit plus Gumbel noise is the largest, which is a draw from the softmax (Gumbel 1954;
Maddison, Tarlow, Minka 2014). The noise is a function of the row's key and the token: a counter-based stream
(Salmon et al. 2011), so that nothing is stored between steps, and rows draw alike wherever they stand.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

WORD = 0xFFFFFFFF
STEP, MIX_A, MIX_B = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35
LARGEST = 1 - 2.0**-24  # below 1 in fp32
SERIES_BELOW = 1 / 64


def row_keys(stream: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """int64 (rows), 64 bits each: SplitMix64 (Steele, Lea, Flood 2014) of a row's seed at its token's place.

    In int64, which wraps as uint64 does; its shifts carry the sign, which is masked away.
    """
    x = stream + (positions.to(torch.int64) + 1) * _GOLDEN
    x = (x ^ ((x >> 30) & _below(30))) * _MIX_1
    x = (x ^ ((x >> 27) & _below(27))) * _MIX_2
    return x ^ ((x >> 31) & _below(31))


def noise_bits(keys: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """int64 (rows, tokens) in [0, 2**32), of a row all different: MurmurHash3's finalizer (Appleby 2011) of the token
    and one half of the key, and again with the other half."""
    tokens = torch.arange(num_tokens, dtype=torch.int64, device=keys.device)
    low, high = (keys & WORD)[:, None], ((keys >> 32) & WORD)[:, None]
    return _finalized(_finalized((tokens * STEP + low) & WORD) ^ high)


def _finalized(x: torch.Tensor) -> torch.Tensor:
    x = ((x ^ (x >> 16)) * MIX_A) & WORD
    x = ((x ^ (x >> 13)) * MIX_B) & WORD
    return x ^ (x >> 16)


def gumbel(bits: torch.Tensor) -> torch.Tensor:
    """fp32 noise: -log of an exponential, whose small values, which win, have all 32 bits."""
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp(max=LARGEST)
    series = uniform * (1 + uniform * (1 / 2 + uniform * (1 / 3 + uniform * (1 / 4 + uniform / 5))))
    return -torch.where(uniform < SERIES_BELOW, series, -(1 - uniform).log()).log()


def draw(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Tokens (rows) by the softmax of fp32 logits (rows, vocabulary); never one whose logit is -inf, where another's is
    not."""
    return (logits + gumbel(noise_bits(keys, logits.shape[-1]))).argmax(-1)


def truncated(
    logits: torch.Tensor, top_ks: torch.Tensor | None, top_ps: torch.Tensor | None, min_ps: torch.Tensor | None
) -> torch.Tensor:
    """Top-k, then top-p, then min-p, as transformers has it; -inf where a token is out.

    Tokens that are as likely as the last one that stays do so too. Nothing is sorted: the last one's logit is found
    bit by bit.

    Args:
        logits: fp32 (rows, vocabulary).
        top_ks, top_ps, min_ps: (rows); None where no row asks for it.
    """
    if top_ks is not None:
        ones = torch.ones((), dtype=torch.int64, device=logits.device)
        logits = _at_least(logits, lambda is_in: torch.where(is_in, ones, 0).sum(-1) >= top_ks)
    if top_ps is not None:
        probs, whole = logits.softmax(-1), top_ps >= 1  # not by rounding: these rows lose no token
        logits = _at_least(logits, lambda is_in: ~whole & (torch.where(is_in, probs, 0.0).sum(-1) >= top_ps))
    if min_ps is not None:
        floor = logits.amax(-1, keepdim=True) + min_ps[:, None].log()  # log 0 is -inf: none below
        logits = logits.masked_fill(logits < floor, -torch.inf)
    return logits


def _at_least(logits: torch.Tensor, suffice: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The logits from the largest on that suffice, -inf below; all where all don't.

    Args:
        suffice: of a mask (rows, vocabulary) whether (rows) its tokens do.
    """
    bits = logits.view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers they are in the order of the floats
    least = torch.full((len(logits), 1), -(2**31), dtype=torch.int64, device=logits.device)
    for bit in reversed(range(32)):
        higher = least + (1 << bit)
        least = torch.where(suffice(ordered >= higher)[:, None], higher, least)
    return logits.masked_fill(ordered < least, -torch.inf)


def log_prob(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """fp32 (rows) of the tokens under the softmax of the logits (rows, vocabulary)."""
    return logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)


def _signed(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits


def _below(shift: int) -> int:
    return int((1 << (64 - shift)) - 1)


_GOLDEN, _MIX_1, _MIX_2 = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
