"""Layouts and routes: known values of Megatron and FSDP layouts, and refusals that name ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import Refused
from core.mesh import Mesh, MeshLayout, RankMesh, Route


def test_megatron_tp2_pp2_on_16_ranks_has_the_known_groups_and_route() -> None:
    layout = MeshLayout.of(pp=2, dp=4, tp=2)
    assert layout.groups("tp")[:2] == ((0, 1), (2, 3))
    assert layout.group_of(0, "dp") == (0, 2, 4, 6)
    assert layout.group_of(0, "pp") == (0, 8)
    assert layout.coordinates(5) == {"pp": 0, "dp": 2, "tp": 1}
    route = layout.route(("dp",), {"pp": -1})
    assert route.dp_ranks == (0, 0, 1, 1, 2, 2, 3, 3) * 2
    assert sorted(route.collected) == [8, 10, 12, 14]
    route.check("actor")


def test_moe_tp2_ep4_on_16_ranks_routes_by_the_dense_layout_with_dp_8() -> None:
    dense = MeshLayout.of(dp=8, tp=2)
    assert dense.route(("dp",)).dp_size == 8
    assert MeshLayout.of(edp=2, ep=4, etp=2).size("edp") == 2
    assert MeshLayout.of(edp=4, ep=4, etp=1).size("edp") == 4


def test_fsdp_with_ulysses_collects_the_first_of_each_sp_group() -> None:
    route = MeshLayout.of(dp=4, sp=2).route(("dp",))
    assert sorted(route.collected) == [0, 2, 4, 6]


def test_actor_tp2_and_rollout_tp4_are_two_meshes_over_the_same_ranks() -> None:
    rollout = MeshLayout.of(dp=2, infer_tp=4, infer_pp=1)
    for rank in range(8):
        at = rollout.coordinates(rank)
        assert tuple(at.values()) == (rank // 4, rank % 4, 0)
        assert at["dp"] * 4 + at["infer_tp"] + at["infer_pp"] == rank


layouts = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(
    lambda sizes: MeshLayout(tuple(f"axis{i}" for i in range(len(sizes))), tuple(sizes))
)


@given(layouts, st.data())
def test_coordinates_and_ranks_are_inverse_and_groups_partition_the_world(
    layout: MeshLayout, data: st.DataObject
) -> None:
    for rank in range(layout.world_size):
        assert layout.rank(**layout.coordinates(rank)) == rank
    along = data.draw(st.sets(st.sampled_from(layout.axes)))
    groups = layout.groups(*along)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    assert {len(group) for group in groups} == {layout.size(*along)}


@given(layouts, st.data())
def test_every_route_of_a_layout_is_sound(layout: MeshLayout, data: st.DataObject) -> None:
    dp_axes = data.draw(st.sets(st.sampled_from(layout.axes)))
    route = layout.route(tuple(dp_axes), {axis: -1 for axis in layout.axes if axis not in dp_axes})
    route.check("any")
    assert [route.dp_ranks[rank] for rank in route.collectors] == list(range(route.dp_size))


def test_a_dp_rank_that_nobody_collects_is_refused_with_the_candidates() -> None:
    with pytest.raises(Refused) as refusal:
        Route((0, 0, 1, 1), frozenset({0})).check("actor")
    text = str(refusal.value)
    assert "'actor'" in text
    assert "dp rank 1" in text
    assert "[2, 3]" in text


def test_a_dp_rank_that_two_ranks_collect_is_refused_with_both() -> None:
    with pytest.raises(Refused) as refusal:
        Route((0, 0, 1, 1), frozenset({0, 1, 2})).check("actor")
    assert "[0, 1]" in str(refusal.value)


@pytest.mark.parametrize("dp_ranks", [(0, 2, 0, 2), (1, 1), (-1, 0), ()])
def test_dp_ids_with_gaps_are_refused(dp_ranks: tuple[int, ...]) -> None:
    with pytest.raises(Refused, match="gaps"):
        Route(dp_ranks, frozenset({0})).check("actor")


def test_layouts_refuse_what_they_do_not_have() -> None:
    layout = MeshLayout.of(dp=2, tp=2)
    for wrong in (
        lambda: layout.rank(pp=0),
        lambda: layout.groups("pp"),
        lambda: layout.coordinates(4),
        lambda: layout.rank(tp=2),
        lambda: MeshLayout.of(dp=0),
        lambda: MeshLayout(("dp", "dp"), (1, 2)),
    ):
        with pytest.raises(Refused):
            wrong()


def test_a_rank_mesh_is_a_mesh_and_refuses_groups_it_does_not_have() -> None:
    layout = MeshLayout.of(dp=2, tp=2)
    mesh = RankMesh(layout, 3, layout.route(("dp",)))
    assert isinstance(mesh, Mesh)
    assert (mesh.dp_rank, mesh.dp_size, mesh.is_collect) == (1, 2, False)
    with pytest.raises(Refused, match="no process groups"):
        mesh.group("tp")
