"""manymesh core: the contract and the binder. It knows no backend's name, and importing it imports nothing heavy."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "core.errors": "ConfigError DeadlineExceeded ManymeshError Refused RegistryError TransferFailed WorkerFailed",
    "core.mesh": "Mesh MeshLayout RankMesh Route",
    "core.manifest": "Capability Limits Manifest ModelFacts Plan Planner",
    "core.hookspecs": "hookimpl",
    "core.config": "EngineConfig OptimizerConfig RolloutConfig structure",
    "core.protocols": (
        "Engine GenerationDelta LogProbKind LossFn LossScale LossSpec Metric MicroResult Rollout RolloutServer"
        " SamplingParams StepInfo TransferRound WeightSpec WeightTransfer"
    ),
    "core.registry": "EngineRegistry",
    "core.calls": "DispatchMode Execute PerRank",
    "core.join": "WeightedMean",
    "core.dispatch": "Dispatch make_nd_compute_dataproto_dispatch_fn on_mesh register",
    "core.worker": "Worker WorkerContext",
    "core.group": "Future RayClassWithInitArgs WorkerGroup",
    "core.colocate": "ColocatedWorker create_colocated_worker_cls",
    "core.transport.local": "LocalWorkerGroup",
    "core.transport.ray": "RayResourcePool RayWorkerGroup ResourcePoolManager",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("manymesh")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'core' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
