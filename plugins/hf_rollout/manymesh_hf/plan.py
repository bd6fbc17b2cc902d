"""Where ranks stand: each has a whole copy of the model, so each is its own dp rank. Imports nothing heavy."""

from __future__ import annotations

from core.errors import Refused
from core.manifest import ModelFacts, Plan
from core.mesh import MeshLayout
from manymesh_hf.config import HfRolloutConfig


def plan(config: HfRolloutConfig, world_size: int, model: ModelFacts | None) -> Plan:
    """One axis, dp, over all ranks; every rank is collected.

    Raises:
        Refused: world_size is below 1.
    """
    if world_size < 1:
        raise Refused("a rollout needs a rank", have=f"world size {world_size}", want="at least 1")
    layout = MeshLayout.of(dp=world_size)
    return Plan(layout, layout.route(("dp",)))
