"""What rows draw: by the softmax, by their key alone, from what truncation leaves. Needs torch alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from manymesh_sglang.draw import draw, gumbel, log_prob, noise_bits, row_keys, truncated

NUM_DRAWS = 40_000


def test_tokens_are_drawn_by_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf, -8.0])
    tokens = draw(logits.expand(NUM_DRAWS, -1), row_keys(torch.tensor(5), torch.arange(NUM_DRAWS)))
    counts, wanted = tokens.bincount(minlength=6).double(), NUM_DRAWS * logits.double().softmax(-1)
    possible = wanted > 0
    assert counts[~possible].sum() == 0
    chi_square = float(((counts - wanted)[possible] ** 2 / wanted[possible]).sum())
    assert chi_square < 20.5  # of 4 degrees of freedom, once in 2,500 seeds


def test_what_a_row_draws_is_told_by_its_stream_and_place_alone() -> None:
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0))
    stream, places = torch.arange(64) * 977, torch.arange(64) % 7
    tokens = draw(logits, row_keys(stream, places))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(draw(logits[order], row_keys(stream[order], places[order])), tokens[order])
    assert draw(logits[5:6], row_keys(stream[5:6], places[5:6])).item() == tokens[5].item()
    assert not torch.equal(draw(logits, row_keys(stream, places + 1)), tokens)
    assert not torch.equal(draw(logits, row_keys(stream + 1, places)), tokens)


def test_a_rows_noise_has_no_token_twice_and_fills_its_32_bits() -> None:
    bits = noise_bits(row_keys(torch.tensor([3, 4]), torch.tensor([0, 0])), 150_000)
    for row in bits:
        assert len(row.unique()) == len(row)
        assert int(row.min()) >= 0
        assert int(row.max()) < 2**32
        shares = (row >> 28).bincount(minlength=16) / len(row)
        assert float((shares - 1 / 16).abs().max()) < 0.004
    assert float((bits[0] == bits[1]).double().mean()) < 1e-4


def test_noise_is_finite_at_both_ends_of_its_bits() -> None:
    ends = gumbel(torch.tensor([0, 1, 2**32 - 1, 2**31]))
    assert ends.isfinite().all()
    wanted = -torch.log(-torch.log1p(-(torch.tensor([0.5, 1.5]).double() * 2.0**-32)))
    assert torch.allclose(ends[:2].double(), wanted, rtol=1e-6)
    only = torch.full((2**12, 300), -torch.inf)
    only[:, 7] = 0.0
    assert (draw(only, row_keys(torch.tensor(1), torch.arange(2**12))) == 7).all()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    k=st.integers(1, 40),
    p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.9),
    asks=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_truncation_is_that_of_transformers(
    seed: int, k: int, p: float, min_p: float, asks: tuple[bool, bool, bool]
) -> None:
    logits = 3 * torch.randn(4, 32, generator=torch.Generator().manual_seed(seed))
    wanted = logits
    for asked, warp in zip(asks, (TopKLogitsWarper(k), TopPLogitsWarper(p), MinPLogitsWarper(min_p)), strict=True):
        wanted = warp(None, wanted) if asked else wanted
    columns = (torch.full((4,), k), torch.full((4,), p), torch.full((4,), min_p))
    left = truncated(logits, *(column if asked else None for column, asked in zip(columns, asks, strict=True)))
    # Where the mass of the likeliest tokens is p but for rounding, either may be right.
    sure = ((logits.sort(-1, descending=True).values.softmax(-1).cumsum(-1) - p).abs() > 1e-5).all(-1) | (p == 1.0)
    assert torch.equal(left[sure], wanted[sure])


def test_rows_that_ask_for_nothing_lose_no_token_beside_rows_that_do() -> None:
    logits = torch.randn(2, 50)
    left = truncated(logits, torch.tensor([3, 2**30]), torch.tensor([0.5, 1.0]), torch.tensor([0.1, 0.0]))
    assert torch.equal(left[1], logits[1])
    assert 1 <= int(left[0].isfinite().sum()) <= 3


def test_tokens_as_likely_as_the_last_one_stay() -> None:
    logits = torch.tensor([[1.0, 0.0, 0.0, -1.0]])
    assert truncated(logits, torch.tensor([2]), None, None).isfinite().tolist() == [[True, True, True, False]]
    assert truncated(logits, None, torch.tensor([0.6]), None).isfinite().tolist() == [[True, True, True, False]]


@pytest.mark.parametrize("vocabulary", [1, 7, 1000])
def test_log_probs_are_of_the_softmax(vocabulary: int) -> None:
    logits = torch.randn(5, vocabulary)
    tokens = torch.arange(5) % vocabulary
    wanted = logits.double().log_softmax(-1)[torch.arange(5), tokens]
    assert float((log_prob(logits, tokens) - wanted).abs().max()) < 1e-5
