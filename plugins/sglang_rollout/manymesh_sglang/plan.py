"""Where ranks stand: each has an engine of its own. Imports nothing heavy."""

from __future__ import annotations

from core.errors import Refused
from core.manifest import ModelFacts, Plan
from core.mesh import MeshLayout
from manymesh_sglang.config import SglangRolloutConfig, SglangServerConfig


def plan(config: SglangRolloutConfig, world_size: int, model: ModelFacts | None) -> Plan:
    """Axis dp: every rank is a copy of the model, and is collected.

    Raises:
        Refused: tensor_parallel is not 1.
    """
    if world_size < 1:
        raise Refused("a rollout needs a rank", have=f"world size {world_size}", want="at least 1")
    if config.tensor_parallel != 1:
        raise Refused(
            "an SGLang engine is not cut over ranks",
            have=f"tensor_parallel {config.tensor_parallel}",
            want="1: it has this rank's device alone",
            mend="use another rollout that cuts a model over ranks",
        )
    layout = MeshLayout.of(dp=world_size)
    return Plan(layout, layout.route(("dp",)))


def server_plan(config: SglangServerConfig, world_size: int, model: ModelFacts | None) -> Plan:
    """As `plan`.

    Raises:
        Refused: as plan, or there are other than world_size addresses.
    """
    if config.addresses and len(config.addresses) != world_size:
        raise Refused(
            "each rank talks to one server",
            have=f"{len(config.addresses)} addresses, {world_size} ranks",
            want=f"a pool of {len(config.addresses)} processes",
        )
    return plan(config, world_size, model)
