"""Where ranks stand: one home for every check of sizes. Imports nothing heavy."""

from __future__ import annotations

from core.errors import Refused
from core.manifest import ModelFacts, Plan
from core.mesh import MeshLayout

from .config import TemplateRolloutConfig


def plan(config: TemplateRolloutConfig, world_size: int, model: ModelFacts | None) -> Plan:
    """One axis, dp, over all ranks: each has prompts of its own, and its output is collected.

    Raises:
        Refused: there is no rank.
    """
    if world_size < 1:
        raise Refused("a rollout needs a rank", have=f"world size {world_size}", want="at least 1")
    layout = MeshLayout.of(dp=world_size)
    return Plan(layout, layout.route(("dp",)))
