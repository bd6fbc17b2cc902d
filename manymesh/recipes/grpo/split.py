"""Trainers and rollouts in pools of their own, called like one group."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from core.group import WorkerGroup
from manymesh.workers.transfer.sync import WeightSync


class SplitGroups:
    """The methods that GrpoTrainer calls on a group, each on the group that has it.

    Args:
        trainers: workers with actor, and reference where it is used.
        rollouts: workers with a rollout.
        sync: weights from one to the other.
    """

    def __init__(self, trainers: WorkerGroup, rollouts: WorkerGroup, sync: WeightSync) -> None:
        self._trainers, self._rollouts, self._sync = trainers, rollouts, sync

    @property
    def world_size(self) -> int:
        return self._trainers.world_size + self._rollouts.world_size

    def init_model(self) -> None:
        with ThreadPoolExecutor(2) as pool:  # both at a time: a large model takes minutes to load
            for future in [pool.submit(group.init_model) for group in (self._trainers, self._rollouts)]:
                future.result()

    def generate_sequences(self, *args: Any, **kwargs: Any) -> Any:
        return self._rollouts.generate_sequences(*args, **kwargs)

    def update_weights(self) -> int:
        return self._sync.sync()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainers, name)


Workers = WorkerGroup | SplitGroups
