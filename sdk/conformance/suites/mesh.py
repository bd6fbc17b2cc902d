"""Every rank in its place: rows are neither lost nor doubled, and the plan is what runs."""

from __future__ import annotations

from typing import Any

import attrs

from core.errors import Refused
from core.manifest import Limits, Plan
from core.mesh import Mesh, MeshLayout, Route
from sdk.conformance.base import Conformance, Subject


@attrs.frozen
class Place:
    """What a rank says of itself, before initialize()."""

    is_mesh: bool
    layout: MeshLayout
    rank: int
    dp_rank: int
    dp_size: int
    is_collect: bool
    limits: Limits | None
    groups: dict[str, list[int]]  # ranks of the process group along each axis
    unknown_axis: str  # how an axis that doesn't exist is answered
    world_size: int


def place(rank: int, world_size: int, subject: Subject, model: str) -> Place:
    import torch.distributed as dist

    backend = subject.build(model=model)
    try:
        mesh: Any = backend.mesh
        groups = (
            {axis: dist.get_process_group_ranks(mesh.group(axis)) for axis in mesh.layout.axes}
            if with_groups(mesh)
            else {}
        )
        try:
            mesh.group("no such axis")
            unknown = "given"
        except Refused:
            unknown = "refused"
        except Exception as error:
            unknown = f"{type(error).__name__}: {error}"
        return Place(
            is_mesh=isinstance(mesh, Mesh),
            layout=mesh.layout,
            rank=mesh.rank,
            dp_rank=mesh.dp_rank,
            dp_size=mesh.dp_size,
            is_collect=mesh.is_collect,
            limits=getattr(backend, "limits", None),
            groups=groups,
            unknown_axis=unknown,
            world_size=dist.get_world_size(),
        )
    finally:
        backend.shutdown()


def with_groups(mesh: Any) -> bool:
    """Whether the mesh has process groups at all; a rollout of one rank needs none."""
    try:
        mesh.group(mesh.layout.axes[0])
    except Refused:
        return False
    return True


class MeshSuite(Conformance):
    """Of every kind of backend that has a mesh."""

    def places(self, world_size: int) -> list[Place]:
        return self.once(("places", world_size), lambda: self.on(world_size, place, self.model_of_suite()))

    def model_of_suite(self) -> str:
        return self.model()

    def test_its_mesh_is_valid_right_after_construction(self, world_size: int) -> None:
        for rank, each in enumerate(self.places(world_size)):
            assert each.is_mesh, "mesh is no core.mesh.Mesh"
            assert (each.rank, each.layout.world_size) == (rank, world_size)
            assert 0 <= each.dp_rank < each.dp_size

    def test_dp_ranks_have_no_gaps_and_each_has_one_collector(self, world_size: int) -> None:
        places = self.places(world_size)
        route = route_of(places)
        route.check("the engine's")
        assert {each.dp_size for each in places} == {route.dp_size}, "ranks disagree on dp_size"
        assert len({each.layout for each in places}) == 1, "ranks disagree on the layout"

    def test_it_runs_where_the_planner_said(self, world_size: int) -> None:
        plan, places = self.planned(world_size, self.model_of_suite()), self.places(world_size)
        if isinstance(plan, Plan):
            assert places[0].layout == plan.layout, f"the engine has {places[0].layout}, the plan {plan.layout}"
            assert route_of(places) == plan.route
            if places[0].limits is not None:
                assert {each.limits for each in places} == {plan.limits}

    def test_its_process_groups_are_those_of_the_layout(self, world_size: int) -> None:
        for rank, each in enumerate(self.places(world_size)):
            want = {axis: list(each.layout.group_of(rank, axis)) for axis in each.groups}
            assert each.groups == want
            assert each.unknown_axis == "refused", f"an unknown axis is {each.unknown_axis}"


def route_of(places: list[Place]) -> Route:
    collected = frozenset(rank for rank, each in enumerate(places) if each.is_collect)
    return Route(tuple(each.dp_rank for each in places), collected)
