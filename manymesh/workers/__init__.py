"""Workers: shells that give any engine or rollout of the registry its place in a group."""

from __future__ import annotations

import importlib
from typing import Any

_HOME_OF = {
    "ActorRolloutRefConfig": "manymesh.workers.actor_rollout_ref",
    "ActorRolloutRefWorker": "manymesh.workers.actor_rollout_ref",
    "MicroBatchConfig": "manymesh.workers.micro_batch",
    "Role": "manymesh.workers.actor_rollout_ref",
    "RolloutClient": "manymesh.workers.client",
    "RolloutServerWorker": "manymesh.workers.server",
    "RolloutWorker": "manymesh.workers.rollout",
    "RolloutWorkerConfig": "manymesh.workers.rollout",
    "TrainingWorker": "manymesh.workers.training",
    "TrainingWorkerConfig": "manymesh.workers.training",
    "TransferConfig": "manymesh.workers.transfer.sync",
    "WeightSync": "manymesh.workers.transfer.sync",
}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)
