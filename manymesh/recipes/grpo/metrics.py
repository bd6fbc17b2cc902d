"""The numbers of a step, and the lines of its samples. Pure functions of what the step has computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from core.batch import objects, response_tokens
from manymesh.recipes.grpo.tracking import REWARD, TIME


def reward_metrics(rewards: torch.Tensor, prompt_id: torch.Tensor) -> dict[str, float]:
    """Statistics of a step's rewards.

    Args:
        rewards: (rows,), float64.
        prompt_id: (rows,), equal for rows of one prompt, which may stand anywhere.
    """
    prompts, group = prompt_id.unique(return_inverse=True)
    low, high = (
        rewards.new_zeros(len(prompts)).scatter_reduce(0, group, rewards, by, include_self=False)
        for by in ("amin", "amax")
    )
    return {
        REWARD: float(rewards.mean()),
        "reward/std": float(rewards.std(correction=0)),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        # Prompts whose samples all got the same: nothing is learnt from them.
        "reward/flat_prompts": float((low == high).double().mean()),
    }


def response_metrics(samples: TensorDict, scores: TensorDict) -> dict[str, float]:
    """Lengths, and how the trainer sees what the rollout sampled: entropy, and the gap between their log-probs.

    Args:
        samples: `response_mask`, `rollout_log_probs`, `finish_reason`.
        scores: `old_log_probs` and `entropy` of the same rows.
    """
    mask = samples["response_mask"]
    gap = response_tokens(samples["rollout_log_probs"], mask) - response_tokens(scores["old_log_probs"], mask)
    num_tokens, rows = len(gap), len(samples)
    return {
        "actor/entropy": float(response_tokens(scores["entropy"], mask).mean()),
        "rollout/log_prob_gap_mean": float(gap.abs().mean()),
        "rollout/log_prob_gap_max": float(gap.abs().max()),
        "response/length_mean": num_tokens / rows,
        "response/num_tokens": num_tokens,
        "response/truncated": objects(samples.get("finish_reason")).count("length") / rows,
    }


def timing_metrics(seconds: float, num_tokens: float, phases: Mapping[str, float]) -> dict[str, float]:
    """Times of a step, which differ between two runs of one seed.

    Args:
        seconds: of the whole step.
        num_tokens: that were sampled.
        phases: seconds by name.
    """
    by_phase = {f"{TIME}phase/{name}": phase_seconds for name, phase_seconds in phases.items()}
    return {f"{TIME}step": seconds, f"{TIME}tokens_per_second": num_tokens / seconds, **by_phase}


def sample_lines(
    prompt_id: Sequence[int], prompts: Sequence[Any], completions: Sequence[str], rewards: Sequence[float], limit: int
) -> list[dict[str, Any]]:
    """The first sample of each prompt, of at most `limit` prompts: all arguments by row."""
    first: dict[int, dict[str, Any]] = {}
    for prompt, text, completion, reward in zip(prompt_id, prompts, completions, rewards, strict=True):
        first.setdefault(prompt, {"prompt": text, "completion": completion, "reward": reward})
    return list(first.values())[:limit]
