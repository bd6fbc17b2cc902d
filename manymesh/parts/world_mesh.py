"""The mesh of a backend whose layout has one axis: all ranks of the process group that the worker has opened."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from core.errors import Refused
from core.manifest import Plan
from core.mesh import RankMesh


def world_size() -> int:
    """Number of ranks in the default process group; 1 where there is none."""
    return dist.get_world_size() if dist.is_initialized() else 1


def world_mesh(plan: Plan) -> RankMesh:
    """This rank's place in the layout of a plan, which has one axis.

    Its `group` is the default process group, and raises Refused for another axis, or where there is no such group.
    """
    layout = plan.layout

    def group(*axes: str) -> Any:
        if axes != layout.axes:
            raise Refused("the mesh has no such axes", have=axes, want=layout.axes, where=str(layout))
        return dist.group.WORLD

    open_ = dist.is_initialized()
    return RankMesh(layout, dist.get_rank() if open_ else 0, plan.route, group if open_ else None)
