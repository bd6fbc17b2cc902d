"""manymesh_sglang.draw's draw as a Triton kernel: noise and maximum in one pass over the logits."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from manymesh_sglang.draw import LARGEST, MIX_A, MIX_B, SERIES_BELOW, STEP

BLOCK = 4096
_STEP, _MIX_A, _MIX_B = tl.constexpr(STEP), tl.constexpr(MIX_A), tl.constexpr(MIX_B)
_LARGEST, _SERIES_BELOW = tl.constexpr(LARGEST), tl.constexpr(SERIES_BELOW)


@triton.jit
def _finalized(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 16)) * _MIX_A
    x = (x ^ (x >> 13)) * _MIX_B
    return x ^ (x >> 16)


@triton.jit
def noise_bits(key, tokens):  # type: ignore[no-untyped-def]
    """As manymesh_sglang.draw.noise_bits, of one row."""
    low, high = (key & 0xFFFFFFFF).to(tl.uint32), ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return _finalized(_finalized(tokens.to(tl.uint32) * _STEP + low) ^ high)


@triton.jit
def _gumbel(bits):  # type: ignore[no-untyped-def]
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, _LARGEST)
    series = uniform * (1 + uniform * (0.5 + uniform * (1.0 / 3 + uniform * (0.25 + uniform / 5))))
    return -tl.log(tl.where(uniform < _SERIES_BELOW, series, -tl.log(1 - uniform)))


@triton.jit
def _best_of_block(  # type: ignore[no-untyped-def]
    logits_ptr, row_stride, keys_ptr, scores_ptr, tokens_ptr, num_tokens, num_blocks, BLOCK: tl.constexpr
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    is_token = tokens < num_tokens
    logits = tl.load(logits_ptr + row * row_stride + tokens, mask=is_token, other=float("-inf")).to(tl.float32)
    scores = logits + _gumbel(noise_bits(tl.load(keys_ptr + row), tokens))
    scores = tl.where(scores == scores, scores, float("inf"))  # NaN wins, as in torch, and is reported
    scores = tl.where(is_token, scores, float("-inf"))
    tl.store(scores_ptr + row * num_blocks + block, tl.max(scores, 0))
    tl.store(tokens_ptr + row * num_blocks + block, block * BLOCK + tl.argmax(scores, 0))


@triton.jit
def _bits_of_block(keys_ptr, bits_ptr, num_tokens, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    bits = noise_bits(tl.load(keys_ptr + row), tokens).to(tl.int64)
    tl.store(bits_ptr + row * num_tokens + tokens, bits, mask=tokens < num_tokens)


def draw_in_one_pass(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """As manymesh_sglang.draw.draw."""
    rows, num_tokens = logits.shape
    num_blocks = triton.cdiv(num_tokens, BLOCK)
    scores = logits.new_empty((rows, num_blocks), dtype=torch.float32)
    tokens = keys.new_empty((rows, num_blocks))
    if rows:
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        grid: Any = (rows, num_blocks)
        _best_of_block[grid](
            logits, logits.stride(0), keys.contiguous(), scores, tokens, num_tokens, num_blocks, BLOCK=BLOCK
        )
    return tokens.gather(1, scores.argmax(1, keepdim=True))[:, 0]


def bits_of(keys: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """As manymesh_sglang.draw.noise_bits: what tests hold it to."""
    bits = keys.new_empty((len(keys), num_tokens))
    grid: Any = (len(keys), triton.cdiv(num_tokens, BLOCK))
    _bits_of_block[grid](keys.contiguous(), bits, num_tokens, BLOCK=BLOCK)
    return bits
