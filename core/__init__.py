"""manymesh core: the contract and the binder. It names no backend, and importing it imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.lazy import lazy_names

if TYPE_CHECKING:
    from core.config import EngineConfig as EngineConfig
    from core.config import OptimizerConfig as OptimizerConfig
    from core.config import RolloutConfig as RolloutConfig
    from core.config import structure as structure
    from core.dispatch import Dispatch as Dispatch
    from core.dispatch import DispatchMode as DispatchMode
    from core.dispatch import Execute as Execute
    from core.dispatch import PerRank as PerRank
    from core.dispatch import WeightedMean as WeightedMean
    from core.dispatch import make_nd_compute_dataproto_dispatch_fn as make_nd_compute_dataproto_dispatch_fn
    from core.dispatch import on_mesh as on_mesh
    from core.dispatch import register as register
    from core.engine import Engine as Engine
    from core.engine import MicroResult as MicroResult
    from core.engine import StepInfo as StepInfo
    from core.engine import WeightSpec as WeightSpec
    from core.environment import Environment as Environment
    from core.environment import Episode as Episode
    from core.errors import BadAnswer as BadAnswer
    from core.errors import ConfigError as ConfigError
    from core.errors import DeadlineExceeded as DeadlineExceeded
    from core.errors import ManymeshError as ManymeshError
    from core.errors import Refused as Refused
    from core.errors import RegistryError as RegistryError
    from core.errors import TransferFailed as TransferFailed
    from core.errors import WorkerFailed as WorkerFailed
    from core.group import ColocatedWorker as ColocatedWorker
    from core.group import Future as Future
    from core.group import Observer as Observer
    from core.group import RayClassWithInitArgs as RayClassWithInitArgs
    from core.group import WorkerGroup as WorkerGroup
    from core.group import create_colocated_worker_cls as create_colocated_worker_cls
    from core.hookspecs import hookimpl as hookimpl
    from core.loss import LossFn as LossFn
    from core.loss import LossScale as LossScale
    from core.loss import LossSpec as LossSpec
    from core.loss import Metric as Metric
    from core.manifest import Capability as Capability
    from core.manifest import Limits as Limits
    from core.manifest import Manifest as Manifest
    from core.manifest import Plan as Plan
    from core.manifest import Planner as Planner
    from core.memory import Load as Load
    from core.memory import Memory as Memory
    from core.memory import MemoryEstimator as MemoryEstimator
    from core.memory import Phase as Phase
    from core.mesh import Mesh as Mesh
    from core.mesh import MeshLayout as MeshLayout
    from core.mesh import RankMesh as RankMesh
    from core.mesh import Route as Route
    from core.model_facts import ModelFacts as ModelFacts
    from core.registry import EngineRegistry as EngineRegistry
    from core.reward import Reward as Reward
    from core.rollout import GenerationDelta as GenerationDelta
    from core.rollout import LogProbKind as LogProbKind
    from core.rollout import ReleasingRollout as ReleasingRollout
    from core.rollout import Rollout as Rollout
    from core.rollout import RolloutServer as RolloutServer
    from core.rollout import SamplingParams as SamplingParams
    from core.rollout import ScoringRollout as ScoringRollout
    from core.tracker import Tracker as Tracker
    from core.transfer import TransferRound as TransferRound
    from core.transfer import WeightTransfer as WeightTransfer
    from core.transport.local import LocalWorkerGroup as LocalWorkerGroup
    from core.transport.ray import RayResourcePool as RayResourcePool
    from core.transport.ray import RayWorkerGroup as RayWorkerGroup
    from core.transport.ray import ResourcePoolManager as ResourcePoolManager
    from core.worker import Worker as Worker
    from core.worker import WorkerContext as WorkerContext

    __version__: str
else:
    _public_name, __dir__, __all__ = lazy_names(__name__)

    def __getattr__(name):
        if name == "__version__":
            from importlib.metadata import version

            return version("manymesh")
        return _public_name(name)
