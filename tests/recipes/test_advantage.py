"""Group advantages against plain numpy, and their way to tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manymesh.recipes.grpo.advantage import group_advantages


@settings(max_examples=60, deadline=None)
@given(
    pairs=st.lists(st.tuples(st.integers(-3, 3), st.floats(-10, 10, width=32)), min_size=1, max_size=30),
    divide_by_std=st.booleans(),
)
def test_advantages_are_those_of_numpy_for_any_order_of_rows(pairs: Any, divide_by_std: bool) -> None:
    prompt_id, rewards = (np.array(column) for column in zip(*pairs, strict=True))
    expected = np.zeros(len(pairs))
    for each in np.unique(prompt_id):
        group = rewards[prompt_id == each].astype(np.float64)
        centred = group - group.mean()
        std = group.std(ddof=1) if len(group) > 1 else 0.0
        expected[prompt_id == each] = centred / (std + 1e-4) if divide_by_std else centred
    have = group_advantages(
        torch.tensor(rewards, dtype=torch.float32), torch.tensor(prompt_id), divide_by_std=divide_by_std
    )
    assert have.dtype == torch.float32
    np.testing.assert_allclose(have.numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reward", [0.0, 1 / 3, 0.1, 1e6])
def test_a_group_whose_samples_all_got_the_same_has_no_advantage(reward: Any) -> None:
    have = group_advantages(torch.full((7,), reward), torch.zeros(7, dtype=torch.int64))
    assert have.abs().max() < 1e-6


def test_one_sample_alone_has_no_advantage() -> None:
    assert group_advantages(torch.tensor([5.0, 1.0]), torch.tensor([1, 2])).tolist() == [0.0, 0.0]
