"""Layouts of ranks on named axes, and the route that dispatch reads off them. Pure Python: planning needs no torch.

"Axis" is for meshes, "dim" for tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, Protocol, runtime_checkable

import attrs

from core.errors import Refused


@attrs.frozen
class Route:
    """What dispatch needs of a mesh.

    Attributes:
        dp_ranks: index is the rank in the group, value the data-parallel rank whose rows it gets.
        collected: the ranks whose output is collected, one for every dp rank.
    """

    dp_ranks: tuple[int, ...]
    collected: frozenset[int]

    @property
    def dp_size(self) -> int:
        return max(self.dp_ranks, default=-1) + 1

    def check(self, mesh: str) -> None:
        """Refuse a route that would lose or double rows.

        Raises:
            Refused: ids are not 0..dp_size-1, a dp rank has no collected rank or more than one.
        """
        where = f"mesh {mesh!r} over {len(self.dp_ranks)} ranks"
        ids = sorted(set(self.dp_ranks))
        if ids != list(range(len(ids))) or not ids:
            raise Refused(
                f"the dp ranks of mesh {mesh!r} have gaps, so some shard would reach nobody",
                have=f"dp ranks by rank {list(self.dp_ranks)}, ids {ids}",
                want=f"every id of 0..{max(len(ids) - 1, 0)}",
                where=where,
                mend="number data-parallel ranks without gaps from 0 in the engine's mesh",
            )
        strangers = sorted(r for r in self.collected if not 0 <= r < len(self.dp_ranks))
        if strangers:
            raise Refused(f"mesh {mesh!r} collects ranks that do not exist", have=strangers, where=where)
        for dp in ids:
            members = [rank for rank, d in enumerate(self.dp_ranks) if d == dp]
            collectors = [rank for rank in members if rank in self.collected]
            if len(collectors) != 1:
                raise Refused(
                    f"{len(collectors)} ranks are collected for dp rank {dp} of mesh {mesh!r}, so its rows would be "
                    + ("doubled" if collectors else "lost"),
                    have=f"collected ranks {collectors}",
                    want=f"exactly one of ranks {members}",
                    where=where,
                    mend=f"let is_collect be true on only one of ranks {collectors or members}",
                )

    @property
    def collectors(self) -> tuple[int, ...]:
        """The collected rank of each dp rank, by dp rank. Needs a checked route."""
        by_dp = {self.dp_ranks[rank]: rank for rank in self.collected}
        return tuple(by_dp[dp] for dp in range(self.dp_size))


@attrs.frozen
class MeshLayout:
    """Named axes over ranks 0..world_size-1, outermost first, in C order (the last axis varies fastest)."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    def __attrs_post_init__(self) -> None:
        if len(self.axes) != len(self.sizes) or len(set(self.axes)) != len(self.axes):
            raise Refused("a layout needs one size for each distinct axis", have=(self.axes, self.sizes))
        if any(size < 1 for size in self.sizes):
            raise Refused("axis sizes are at least 1", have=self._by_axis)

    @classmethod
    def of(cls, **sizes: int) -> MeshLayout:
        """`MeshLayout.of(pp=2, dp=4, tp=2)`: axes in the order written, outermost first."""
        return cls(tuple(sizes), tuple(sizes.values()))

    @property
    def _by_axis(self) -> dict[str, int]:
        return dict(zip(self.axes, self.sizes, strict=True))

    @property
    def world_size(self) -> int:
        return prod(self.sizes)

    def size(self, *axes: str) -> int:
        """Number of ranks along the axes together; an absent axis counts 1."""
        return prod(self._by_axis.get(axis, 1) for axis in axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of a rank on every axis."""
        if not 0 <= rank < self.world_size:
            raise Refused(f"rank {rank} is not in {self}", want=f"0..{self.world_size - 1}")
        out: dict[str, int] = {}
        for axis, size in reversed(self._by_axis.items()):
            rank, out[axis] = divmod(rank, size)
        return {axis: out[axis] for axis in self.axes}

    def rank(self, **coordinates: int) -> int:
        """The rank at the coordinates; axes not named are at 0."""
        self._known(coordinates)
        number = 0
        for axis, size in self._by_axis.items():
            at = coordinates.get(axis, 0)
            if not 0 <= at < size:
                raise Refused(f"axis {axis!r} has no position {at}", want=f"0..{size - 1}", where=str(self))
            number = number * size + at
        return number

    def index(self, rank: int, *axes: str) -> int:
        """Position of a rank along the axes taken together, in C order; absent axes don't count."""
        at = self.coordinates(rank)
        number = 0
        for axis, size in self._by_axis.items():
            if axis in axes:
                number = number * size + at[axis]
        return number

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """All groups of ranks that differ only along `axes`, by their lowest rank."""
        self._known(axes)
        table: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            key = tuple(at for axis, at in self.coordinates(rank).items() if axis not in axes)
            table.setdefault(key, []).append(rank)
        return tuple(tuple(ranks) for ranks in table.values())

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that share a group along `axes` with `rank`."""
        return next(group for group in self.groups(*axes) if rank in group)

    def route(self, dp_axes: Sequence[str], collect: Mapping[str, int] | None = None) -> Route:
        """Route by the dp axes.

        Args:
            dp_axes: the axes along which rows differ.
            collect: the position of the collected rank on other axes, negative from the end; 0 where not given.
                Megatron: `route(("dp",), {"pp": -1})`.
        """
        collect = dict(collect or {})
        self._known((*dp_axes, *collect))
        want = {axis: collect.get(axis, 0) % size for axis, size in self._by_axis.items() if axis not in dp_axes}
        ranks = range(self.world_size)
        collected = frozenset(
            rank for rank in ranks if all(self.coordinates(rank)[axis] == at for axis, at in want.items())
        )
        return Route(tuple(self.index(rank, *dp_axes) for rank in ranks), collected)

    def _known(self, axes: Iterable[str]) -> None:
        unknown = [axis for axis in axes if axis not in self.axes]
        if unknown:
            raise Refused(f"unknown axes {unknown}", want=f"some of {self.axes}", where=str(self))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}={s}" for a, s in self._by_axis.items()) + "]"


@runtime_checkable
class Mesh(Protocol):
    """An engine's place in its layout. Valid right after the engine's construction, before `initialize()`."""

    @property
    def layout(self) -> MeshLayout: ...
    @property
    def rank(self) -> int: ...
    @property
    def dp_rank(self) -> int: ...
    @property
    def dp_size(self) -> int: ...
    @property
    def is_collect(self) -> bool: ...
    def group(self, *axes: str) -> Any:
        """The torch process group of this rank along the axes."""
        ...


@attrs.frozen
class RankMesh:
    """The ready Mesh: a layout, a rank, a route, and where the process groups come from."""

    layout: MeshLayout
    rank: int
    route: Route
    groups: Callable[..., Any] | None = attrs.field(default=None, repr=False, eq=False)

    @property
    def dp_rank(self) -> int:
        return self.route.dp_ranks[self.rank]

    @property
    def dp_size(self) -> int:
        return self.route.dp_size

    @property
    def is_collect(self) -> bool:
        return self.rank in self.route.collected

    def group(self, *axes: str) -> Any:
        if self.groups is None:
            raise Refused("this mesh has no process groups", where=str(self.layout))
        return self.groups(*axes)
