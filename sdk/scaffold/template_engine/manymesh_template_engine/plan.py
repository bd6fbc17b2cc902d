"""Where ranks stand: one home for every check of sizes. Imports nothing heavy."""

from __future__ import annotations

from core.errors import Refused
from core.manifest import Limits, ModelFacts, Plan
from core.mesh import MeshLayout

from .config import TemplateEngineConfig

OUTPUTS = frozenset({"log_probs", "entropy", "top_log_probs"})


def plan(config: TemplateEngineConfig, world_size: int, model: ModelFacts | None) -> Plan:
    """One axis, dp, over all ranks: each has rows of its own, and its output is collected.

    Raises:
        Refused: there is no rank.
    """
    if world_size < 1:
        raise Refused("an engine needs a rank", have=f"world size {world_size}", want="at least 1")
    layout = MeshLayout.of(dp=world_size)
    return Plan(layout, layout.route(("dp",)), Limits(outputs=OUTPUTS))
