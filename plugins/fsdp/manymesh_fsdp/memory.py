"""What the FSDP2 engine holds of a device's memory, told from config.json and options. Light: no torch."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from core.memory import Load, Memory, Phase
from core.model_facts import ModelFacts
from manymesh.parts.decoder_shape import DTYPE_BYTES, DecoderShape
from manymesh.parts.pass_memory import PassMemory
from manymesh_fsdp.config import FsdpConfig

# Layers whose full parameters exist at once: one computes, the next one is gathered, into one buffer and out of it.
LAYERS_AT_ONCE = 3


def memory(config: FsdpConfig, world_size: int, model: ModelFacts, load: Load) -> Sequence[Memory]:
    """By phase, of any rank: all hold alike, but that rank 0 reads the model on the CPU.

    Raises:
        Refused: see DecoderShape.of.
    """
    config = config.on(load.device)
    shape = DecoderShape.of(model)
    size = DTYPE_BYTES[config.dtype]
    computed = DTYPE_BYTES[config.compute_dtype or config.dtype]
    whole, shard = shape.num_parameters, -(-shape.num_parameters // world_size) * size
    trained = shard if config.trainable else 0
    # On one rank without mixed precision the model is plain, as plugins/fsdp's _shard has it.
    plain = world_size == 1 and {config.compute_dtype, config.reduce_dtype} <= {None, config.dtype}
    layers = [layer.total for layer in shape.layers]
    gathered = 0
    if not plain:
        at_once = LAYERS_AT_ONCE * max(layers) if config.reshard_after_forward else sum(layers) + max(layers)
        gathered = (shape.outside + at_once) * computed
    one = PassMemory.of(shape, load.micro_batch_tokens, computed, recomputed=int(config.gradient_checkpointing))
    idle = Memory(Phase.IDLE, parameters=shard, gradients=trained, optimizer=2 * trained)
    there = attrs.evolve(idle, parameters=shard + gathered)
    full_tensor = 2 * shape.largest_tensor * size
    phases = [
        _loading(idle, shape, size, load),
        attrs.evolve(there, phase=Phase.EVAL, activations=one.forward_only),
        attrs.evolve(idle, phase=Phase.EXPORT, activations=full_tensor),
    ]
    if config.trainable:
        reduced = DTYPE_BYTES[config.reduce_dtype or config.dtype]
        several = load.num_micro_batches > 1
        if plain:
            moments = [
                attrs.evolve(there, gradients=whole * size if several else 0, activations=one.turning),
                attrs.evolve(there, gradients=whole * size, activations=one.working),
            ]
        else:
            # Gradients are reduced over ranks with a step's last micro-batch. Those of the micro-batches before wait on
            # each rank in `reduce_dtype`, of the whole model and not sharded.
            waiting = whole * reduced if several else 0
            before = max(waiting, shard + shape.outside * computed)  # when the last layers are computed
            late = attrs.evolve(idle, parameters=shard + (shape.outside + 2 * max(layers)) * computed, gradients=before)
            ending = shape.outside * (reduced + max(computed, reduced if several else 0))
            moments = [
                attrs.evolve(there, gradients=waiting, activations=one.turning),
                attrs.evolve(late, activations=one.working),
                attrs.evolve(late, gradients=before + max(layers) * (computed + reduced)),
                # At the very end those of embedding and head, which are one unit.
                attrs.evolve(idle, parameters=shard + shape.outside * computed, gradients=shard + ending),
            ]
        moments.append(idle)  # the optimizer's step
        phases.append(attrs.evolve(max(moments, key=lambda each: each.total), phase=Phase.TRAIN))
    return [_with_offload(config, each, load) for each in (idle, *phases)]


def _loading(idle: Memory, shape: DecoderShape, size: int, load: Load) -> Memory:
    """Rank 0 reads all of the model on the CPU; tensor by tensor all copy their shards."""
    read = shape.num_parameters * size if load.rank == 0 else 0
    on_cpu = load.device == "cpu"
    reading = Memory(
        Phase.LOAD,
        parameters=idle.parameters + (read if on_cpu else 0),
        activations=shape.largest_tensor * size,
        host=0 if on_cpu else read,
    )
    loaded_model = attrs.evolve(idle, phase=Phase.LOAD, host=reading.host)
    return max(reading, loaded_model, key=lambda each: each.total)


def _with_offload(config: FsdpConfig, memory: Memory, load: Load) -> Memory:
    """Where parts are on the CPU outside of the modes that need them. Gradients go with the parameters."""
    if load.device == "cpu":
        return memory
    away = 0
    if config.offload_optimizer and memory.phase in (Phase.IDLE, Phase.EVAL, Phase.EXPORT):
        away += memory.optimizer
        memory = attrs.evolve(memory, optimizer=0)
    if config.offload_parameters and memory.phase is Phase.IDLE:
        away += memory.parameters + memory.gradients
        memory = attrs.evolve(memory, parameters=0, gradients=0)
    return attrs.evolve(memory, host=memory.host + away)
