"""The learning rate's schedule, and what every optimizer that follows it has in common."""

from __future__ import annotations

from collections.abc import Sequence
from math import cos, pi
from typing import Any

from core.config import OptimizerConfig


def lr_factor(config: OptimizerConfig, step: int) -> float:
    """Multiplier of `config.lr` at a step counted from 0: linear warm-up, then the schedule."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant" or not config.total_steps:
        return 1.0
    progress = min(1.0, (step - config.warmup_steps) / max(1, config.total_steps - config.warmup_steps))
    factor = 1 - progress if config.schedule == "linear" else (1 + cos(pi * progress)) / 2
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * factor


class Scheduled:
    """Base of optimizers whose parameter groups follow the schedule.

    Args:
        groups: the groups of a torch optimizer, or of one that has such; `lr_mult` in a group multiplies its rate.
    """

    def __init__(self, config: OptimizerConfig, groups: Sequence[dict[str, Any]]) -> None:
        self._config, self._groups = config, groups
        self.schedule_step = 0

    @property
    def schedule_step(self) -> int:
        """How often the schedule has advanced. Setting it sets the learning rate."""
        return self._schedule_step

    @schedule_step.setter
    def schedule_step(self, step: int) -> None:
        self._schedule_step = step
        for group in self._groups:
            group["lr"] = self.lr * group.get("lr_mult", 1.0)

    @property
    def lr(self) -> float:
        """The rate of the next step."""
        return self._config.lr * lr_factor(self._config, self._schedule_step)

    def advance(self) -> float:
        """Move the schedule on by a step; gives the rate that the step just taken used."""
        rate = self.lr
        self.schedule_step += 1
        return rate
