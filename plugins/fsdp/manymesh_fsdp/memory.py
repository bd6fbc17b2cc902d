"""What the FSDP2 engine holds of a device's memory, told from config.json and options. Light: no torch."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from core.memory import Load, Memory, Phase
from core.model_facts import ModelFacts
from manymesh.parts.decoder_shape import DTYPE_BYTES, DecoderShape
from manymesh.parts.pass_memory import PassMemory
from manymesh_fsdp.config import FsdpConfig


@attrs.frozen
class Sizes:
    """Bytes of one rank.

    Attributes:
        shard: of its parameters; of its gradients and each moment of the optimizer too.
        forward, backward: of full parameters that exist at once in a pass. In forward one layer computes, and the next
            one is gathered into one buffer and copied out of it; in backward the next one is gathered.
        outside: of embedding, head and last norm in the computation's dtype.
        resident: of full parameters that stay from a forward pass on: these, and without reshard_after_forward all.
        layer: of one layer's gradient, and its copy for the reduction.
        waiting: of gradients of a step's micro-batches but the last, in `reduce_dtype`: of the whole model, and not
            sharded, since gradients cross ranks with the last one.
        root: of the gradient of what is outside of the layers, and its copy: one unit, which is reduced last.
    """

    shard: int
    forward: int
    backward: int
    outside: int
    resident: int
    layer: int
    waiting: int
    root: int

    @classmethod
    def of(cls, config: FsdpConfig, shape: DecoderShape, world_size: int, num_micro_batches: int) -> Sizes:
        size, computed = DTYPE_BYTES[config.dtype], DTYPE_BYTES[config.compute_dtype or config.dtype]
        reduced = DTYPE_BYTES[config.reduce_dtype or config.dtype]
        shard = -(-shape.num_parameters // world_size) * size
        waiting = shape.num_parameters * reduced if num_micro_batches > 1 else 0
        # On one rank without mixed precision the model is plain, and its gradients are what they are.
        if world_size == 1 and {config.compute_dtype, config.reduce_dtype} <= {None, config.dtype}:
            return cls(shard, 0, 0, 0, 0, 0, waiting, 0)
        largest = max(layer.total for layer in shape.layers)
        every = sum(layer.total for layer in shape.layers)
        forward, backward = (3 * largest, 2 * largest) if config.reshard_after_forward else (every + largest, every)
        outside = shape.outside
        return cls(
            shard=shard,
            forward=(outside + forward) * computed,
            backward=(outside + backward) * computed,
            outside=outside * computed,
            resident=(outside + (0 if config.reshard_after_forward else every)) * computed,
            layer=largest * (computed + reduced),
            waiting=waiting,
            root=outside * (reduced + (max(computed, reduced) if waiting else computed)),
        )


def memory(config: FsdpConfig, world_size: int, model: ModelFacts, load: Load) -> Sequence[Memory]:
    """By phase, of any rank: all hold alike, but that rank 0 reads the model on the CPU.

    Raises:
        Refused: see DecoderShape.of.
    """
    config = config.on(load.device)
    shape = DecoderShape.of(model)
    size, computed = DTYPE_BYTES[config.dtype], DTYPE_BYTES[config.compute_dtype or config.dtype]
    sizes = Sizes.of(config, shape, world_size, load.num_micro_batches)
    one = PassMemory.of(shape, load.micro_batch_tokens, computed, recomputed=int(config.gradient_checkpointing))
    trained = sizes.shard if config.trainable else 0
    idle = Memory(Phase.IDLE, parameters=sizes.shard, gradients=trained, optimizer=2 * trained)
    scoring = [
        attrs.evolve(idle, phase=Phase.EVAL, parameters=sizes.shard + sizes.forward, activations=one.working),
        attrs.evolve(idle, phase=Phase.EVAL, parameters=sizes.shard + sizes.resident, activations=one.logits),
    ]
    exporting = attrs.evolve(idle, phase=Phase.EXPORT, activations=2 * shape.largest_tensor * size)
    phases = [idle, _loading(idle, shape, size, load), max(scoring, key=lambda each: each.total), exporting]
    if config.trainable:
        phases.append(max(_training(idle, sizes, one), key=lambda each: each.total))
    return [_with_offload(config, each, load) for each in phases]


def _training(idle: Memory, sizes: Sizes, one: PassMemory) -> list[Memory]:
    """The moments of a step that may be the worst."""
    step = attrs.evolve(idle, phase=Phase.TRAIN)
    computing = attrs.evolve(step, parameters=sizes.shard + sizes.backward)
    late = max(sizes.waiting, sizes.shard + sizes.outside)  # gradients where the last layers are computed
    return [
        attrs.evolve(computing, gradients=sizes.waiting, activations=one.turning),
        attrs.evolve(computing, gradients=late, activations=one.working),
        attrs.evolve(computing, gradients=late + sizes.layer),
        attrs.evolve(step, parameters=sizes.shard + sizes.outside, gradients=sizes.shard + sizes.root),
        step,  # the optimizer's
    ]


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
