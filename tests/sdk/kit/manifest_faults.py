"""Faults of meshes, planners and manifests: see engine_faults."""

from __future__ import annotations

import itertools
import os
from typing import Any

import attrs

from core.manifest import Capability, Plan
from core.memory import Memory, Phase
from core.mesh import MeshLayout, Route
from core.registry import Backend
from tests.sdk.kit.faults import Fault, capabilities, caught_by, entry_fault, with_manifest


@caught_by("test_it_runs_where_the_planner_said[world 2]")
class OtherDpRank(Fault):
    """states another dp rank than the planned one"""

    @property
    def mesh(self) -> Any:
        real = super().mesh  # type: ignore[misc]
        return attrs.evolve(real, route=Route(real.route.dp_ranks[::-1], real.route.collected))


@caught_by("test_dp_ranks_have_no_gaps_and_each_has_one_collector[world 2]")
class TwoCollectors(Fault):
    """has one dp rank collected twice"""

    @property
    def mesh(self) -> Any:
        real = super().mesh  # type: ignore[misc]
        ranks = range(real.layout.world_size)
        return attrs.evolve(real, route=Route((0,) * len(ranks), frozenset(ranks)))


@entry_fault("imports torch in its manifest", "test_listing_and_planning_import_nothing_heavy")
def imports_torch(entry: Backend) -> Backend:
    return attrs.evolve(entry, module="sdk.reference")


@entry_fault("plans by the environment", "test_the_planner_reads_no_environment")
def plans_by_environment(entry: Backend) -> Backend:
    return with_manifest(entry, planner=f"{__name__}:plan_by_environment")


@entry_fault("plans otherwise when asked again", "test_the_planner_gives_the_same_answer_twice")
def plans_by_turn(entry: Backend) -> Backend:
    return with_manifest(entry, planner=f"{__name__}:plan_by_turn")


@entry_fault("imports torch to estimate its memory", "test_listing_and_planning_import_nothing_heavy")
def estimates_with_torch(entry: Backend) -> Backend:
    return with_manifest(entry, memory=f"{__name__}:estimate_with_torch")


@entry_fault(
    "estimates other memory when asked again", "test_its_memory_is_estimated_for_every_phase_and_alike_when_asked_again"
)
def estimates_by_turn(entry: Backend) -> Backend:
    return with_manifest(entry, memory=f"{__name__}:estimate_by_turn")


@entry_fault("requires what isn't installed", "test_what_it_requires_is_installed_in_a_version_that_it_names")
def requires_too_much(entry: Backend) -> Backend:
    return with_manifest(entry, requires=(("torch>=99",),))


@entry_fault(
    "moves to CPU, which its manifest doesn't offer", "test_an_engine_has_the_methods_of_its_capabilities_and_no_others"
)
def hides_offload(entry: Backend) -> Backend:
    return with_manifest(entry, capabilities=capabilities(entry) - {Capability.OFFLOAD})


@entry_fault("offers an adapter that it doesn't have", "test_the_adapter_alone_is_what_training_moves")
def claims_adapter(entry: Backend) -> Backend:
    return with_manifest(entry, capabilities=capabilities(entry) | {Capability.ADAPTER})


def plan_by_environment(config: Any, world_size: int, model: Any) -> Plan:
    sizes = {"dp": world_size} if "MANYMESH_DP" not in os.environ else {"tp": world_size}
    layout = MeshLayout.of(**sizes)
    return Plan(layout, layout.route(tuple(sizes)))


_turns = itertools.count()


def estimate_with_torch(config: Any, world_size: int, model: Any, load: Any) -> list[Memory]:
    import torch

    free = int(torch.ones(1).sum())
    return [Memory(phase, parameters=free) for phase in (Phase.IDLE, Phase.TRAIN)]


def estimate_by_turn(config: Any, world_size: int, model: Any, load: Any) -> list[Memory]:
    return [Memory(phase, parameters=next(_turns)) for phase in (Phase.IDLE, Phase.TRAIN)]


def plan_by_turn(config: Any, world_size: int, model: Any) -> Plan:
    layout = MeshLayout.of(**{f"dp{next(_turns)}": world_size})
    return Plan(layout, layout.route(layout.axes))
