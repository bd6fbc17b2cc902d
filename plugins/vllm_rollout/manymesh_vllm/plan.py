"""Where ranks stand: dp copies of the model, each cut over infer_tp neighbouring ranks. Imports nothing heavy."""

from __future__ import annotations

import attrs

from core.errors import Refused
from core.manifest import ModelFacts, Plan
from core.mesh import MeshLayout
from manymesh.parts.decoder_shape import can_shard_heads
from manymesh_vllm.config import VllmRolloutConfig, VllmServerConfig

TP = "infer_tp"


def plan(config: VllmRolloutConfig, world_size: int, model: ModelFacts | None) -> Plan:
    """Axes dp and infer_tp; rank r has dp rank r // tp, and the first of each dp rank is collected.

    Another engine on the same ranks may lie otherwise: weights cross by name.

    Raises:
        Refused: tensor_parallel doesn't divide the world, or the model's heads.
    """
    if world_size < 1:
        raise Refused("a rollout needs a rank", have=f"world size {world_size}", want="at least 1")
    tp = config.tensor_parallel
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    legal = [size for size in divisors if can_shard_heads(model, size)]
    if tp not in legal:
        why = "doesn't divide the model's heads" if tp in divisors else f"doesn't divide the {world_size} ranks"
        heads = f", {model.num_heads} heads, {model.num_kv_heads} KV heads" if model is not None else ""
        raise Refused(
            f"tensor_parallel {tp} {why}",
            have=f"world size {world_size}{heads}",
            want=f"one of {', '.join(map(str, legal))}",
        )
    layout = MeshLayout.of(dp=world_size // tp, **{TP: tp})
    return Plan(layout, layout.route(("dp",), {TP: 0}))


def server_plan(config: VllmServerConfig, world_size: int, model: ModelFacts | None) -> Plan:
    """Replicas that each have an engine of their own: one a rank, whose processes beside it hold the model together,
    with a GPU each.

    Raises:
        Refused: tensor_parallel doesn't divide the model's heads.
    """
    if not can_shard_heads(model, config.tensor_parallel):
        plan(config, config.tensor_parallel, model)  # says which sizes do
    whole = plan(attrs.evolve(config, tensor_parallel=1), world_size, model)
    return attrs.evolve(whole, gpus_per_process=config.tensor_parallel)
