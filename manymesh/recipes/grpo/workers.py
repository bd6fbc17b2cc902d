"""The groups of a run, and the weights between them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs

from core.group import WorkerGroup
from manymesh.workers.transfer.sync import WeightSync


@attrs.frozen
class Workers:
    """Who trains, who samples, and how weights get from one to the other.

    Attributes:
        trainers: workers with actor, and reference where it is used.
        rollouts: workers with a rollout: the same group, or one in a pool of its own.
    """

    trainers: WorkerGroup
    rollouts: WorkerGroup
    sync: WeightSync

    @classmethod
    def shared(cls, group: WorkerGroup) -> Workers:
        """One group of workers that have both actor and rollout."""
        return cls(group, group, WeightSync(group, group))

    @property
    def world_size(self) -> int:
        """Number of ranks of all groups."""
        return sum(group.world_size for group in self._groups)

    def init_model(self) -> None:
        """Build the models of all groups at the same time, since a large one takes minutes to load."""
        with ThreadPoolExecutor(2) as pool:
            for future in [pool.submit(group.init_model) for group in self._groups]:
                future.result()

    def settled_options(self) -> str:
        """What was left to the devices and is settled there, in words: "actor dtype=float32"; "" where nothing was."""
        options: dict[str, dict[str, Any]] = {}
        for group in self._groups:
            options |= group.settled_options()
        texts = {part: " ".join(f"{name}={value}" for name, value in each.items()) for part, each in options.items()}
        return ", ".join(f"{part} {each}" for part, each in texts.items() if each)

    @property
    def _groups(self) -> tuple[WorkerGroup, ...]:
        return (self.trainers,) if self.rollouts is self.trainers else (self.trainers, self.rollouts)
