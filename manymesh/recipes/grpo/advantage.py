"""Advantages of GRPO (arXiv 2402.03300): a sample's reward against those of the other samples of its prompt."""

from __future__ import annotations

import torch


def group_advantages(
    rewards: torch.Tensor, prompt_id: torch.Tensor, *, divide_by_std: bool = True, eps: float = 1e-4
) -> torch.Tensor:
    """`(reward - mean) / (std + eps)` within the rows of one prompt, wherever these stand in the batch.

    Args:
        rewards: (rows,).
        prompt_id: (rows,), equal for rows of one group.
        divide_by_std: by the sample standard deviation (n - 1). False leaves the plain difference, which
            doesn't favour prompts that are nearly always or hardly ever solved (arXiv 2503.20783).

    Returns:
        (rows,) fp32. Zero for a group of one, and where all rewards of a group are equal.
    """
    _, group = prompt_id.unique(return_inverse=True)
    rewards = rewards.double()  # a third summed in fp32 leaves a rest that eps doesn't hide
    count = torch.bincount(group).double()
    mean = torch.bincount(group, rewards) / count
    centred = rewards - mean[group]
    if divide_by_std:
        variance = torch.bincount(group, centred.square()) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt()[group] + eps)
    return centred.float()
