"""The numbers of a step, whatever order its rows stand in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from core.batch import jagged_from, object_column
from manymesh.recipes.grpo.metrics import response_metrics, reward_metrics, sample_lines, timing_metrics
from manymesh.recipes.grpo.tracking import REWARD


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=12), st.randoms())
def test_rewards_are_compared_within_their_prompt_wherever_its_rows_stand(
    rows: list[tuple[int, float]], random: Any
) -> None:
    def metrics() -> dict[str, float]:
        prompts, rewards = zip(*rows, strict=True)
        return reward_metrics(torch.tensor(rewards, dtype=torch.float64), torch.tensor(prompts))

    groups: dict[int, set[float]] = {}
    for prompt, reward in rows:
        groups.setdefault(prompt, set()).add(reward)
    values = np.array([reward for _, reward in rows])
    want = {
        REWARD: values.mean(),
        "reward/std": values.std(),
        "reward/min": values.min(),
        "reward/max": values.max(),
        "reward/flat_prompts": sum(len(rewards) == 1 for rewards in groups.values()) / len(groups),
    }
    assert metrics() == pytest.approx(want)
    random.shuffle(rows)
    assert metrics() == pytest.approx(want)


def test_metrics_of_responses_leave_prompts_out() -> None:
    lengths = torch.tensor([3, 2])

    def column(*values: float) -> torch.Tensor:
        return jagged_from(torch.tensor(values, dtype=torch.float32), lengths)

    samples = TensorDict(
        {
            "response_mask": jagged_from(torch.tensor([False, True, True, False, True]), lengths),
            "rollout_log_probs": column(9, -1, -2, 9, -3),
            "finish_reason": object_column(["length", "stop"]),
        },
        batch_size=[2],
    )
    scores = TensorDict({"old_log_probs": column(0, -1.5, -2, 0, -2), "entropy": column(7, 1, 2, 7, 3)}, batch_size=[2])
    assert response_metrics(samples, scores) == pytest.approx(
        {
            "actor/entropy": 2,
            "rollout/log_prob_gap_mean": 0.5,
            "rollout/log_prob_gap_max": 1,
            "response/length_mean": 1.5,
            "response/num_tokens": 3,
            "response/truncated": 0.5,
        }
    )


def test_samples_are_the_first_of_each_prompt() -> None:
    lines = sample_lines([4, 4, 2, 4, 9], list("aabac"), list("uvwxy"), [0.0, 1.0, 2.0, 3.0, 4.0], limit=2)
    assert lines == [
        {"prompt": "a", "completion": "u", "reward": 0.0},
        {"prompt": "b", "completion": "w", "reward": 2.0},
    ]


def test_times_have_a_prefix_by_which_two_runs_of_one_seed_are_compared() -> None:
    assert timing_metrics(2.0, 10, {"update": 1.5}) == {
        "time/step": 2.0,
        "time/tokens_per_second": 5.0,
        "time/phase/update": 1.5,
    }
