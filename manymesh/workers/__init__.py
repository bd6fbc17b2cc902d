"""Workers: shells that give any engine or rollout of the registry its place in a group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.lazy import lazy_names

if TYPE_CHECKING:
    from manymesh.workers.actor_rollout_ref import ActorRolloutRefConfig as ActorRolloutRefConfig
    from manymesh.workers.actor_rollout_ref import ActorRolloutRefWorker as ActorRolloutRefWorker
    from manymesh.workers.actor_rollout_ref import Role as Role
    from manymesh.workers.client import RolloutClient as RolloutClient
    from manymesh.workers.micro_batch import MicroBatchConfig as MicroBatchConfig
    from manymesh.workers.rollout import RolloutWorker as RolloutWorker
    from manymesh.workers.rollout import RolloutWorkerConfig as RolloutWorkerConfig
    from manymesh.workers.server import RolloutServerWorker as RolloutServerWorker
    from manymesh.workers.training import TrainingWorker as TrainingWorker
    from manymesh.workers.training import TrainingWorkerConfig as TrainingWorkerConfig
    from manymesh.workers.transfer.sync import TransferConfig as TransferConfig
    from manymesh.workers.transfer.sync import WeightSync as WeightSync
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
