"""Draws: a stream of uniforms for each row, and tokens by inverse CDF."""

from __future__ import annotations

import torch

from manymesh.parts.sampling import draw, row_uniforms


def test_uniforms_are_uniform_and_independent_of_the_number_of_steps() -> None:
    ids = torch.arange(200).repeat_interleave(5)
    samples = torch.arange(5).repeat(200)
    uniforms = row_uniforms(7, ids, samples, 64)
    assert uniforms.shape == (64, 1000)
    assert 0 <= float(uniforms.min()) < float(uniforms.max()) < 1
    assert torch.equal(uniforms[:10], row_uniforms(7, ids, samples, 10))
    counts = torch.histc(uniforms, bins=50, min=0, max=1)
    assert ((counts - 1280) ** 2 / 1280).sum() < 49 + 4 * 98**0.5
    # Rows and steps are not correlated: the correlation of n independent pairs has deviation 1/sqrt(n).
    centred = uniforms - 0.5
    for a, b in ((centred[:, :-1], centred[:, 1:]), (centred[:-1], centred[1:])):
        assert abs(float((a * b).mean()) * 12) < 4 / a.numel() ** 0.5


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    probs = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]]).repeat(4, 1)
    tokens = draw(probs, torch.tensor([0.0, 0.29, 0.31, 1 - 2.0**-53], dtype=torch.float64))
    assert tokens[:, 0].tolist() == [1, 1, 3, 3]
