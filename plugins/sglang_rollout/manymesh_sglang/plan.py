"""Where ranks stand: each has an engine of its own, with one device or several. Imports nothing heavy."""

from __future__ import annotations

import attrs

from core.errors import Refused
from core.manifest import ModelFacts, Plan
from core.mesh import MeshLayout
from manymesh.parts.decoder_shape import can_shard_heads
from manymesh_sglang.config import SglangRolloutConfig, SglangServerConfig


def plan(config: SglangRolloutConfig, world_size: int, model: ModelFacts | None) -> Plan:
    """Axis dp: every rank has a copy of the model, and is collected. SGLang's processes beside the rank hold the copy
    together, with a GPU each.

    Raises:
        Refused: tensor_parallel doesn't divide the model's heads.
    """
    if world_size < 1:
        raise Refused("a rollout needs a rank", have=f"world size {world_size}", want="at least 1")
    tp = config.tensor_parallel
    if model is not None and not can_shard_heads(model, tp):
        sizes = [size for size in range(1, (model.num_heads or 1) + 1) if can_shard_heads(model, size)]
        raise Refused(
            f"tensor_parallel {tp} doesn't divide the model's heads",
            have=f"{model.num_heads} heads, {model.num_kv_heads} KV heads",
            want=f"one of {', '.join(map(str, sizes))}",
        )
    layout = MeshLayout.of(dp=world_size)
    return Plan(layout, layout.route(("dp",)), gpus_per_process=tp)


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
    layout_plan = plan(config, world_size, model)
    return attrs.evolve(layout_plan, gpus_per_process=1) if config.addresses else layout_plan  # the servers have theirs
