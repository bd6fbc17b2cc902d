"""What the Megatron engine holds of a device's memory, told from config.json and options. No torch, no megatron."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from core.memory import Load, Memory, Phase
from core.model_facts import ModelFacts
from manymesh.parts.decoder_shape import DTYPE_BYTES, DecoderShape, Layer
from manymesh.parts.pass_memory import PassMemory
from manymesh_megatron.config import MegatronConfig
from manymesh_megatron.plan import EXPERT, plan

MOMENTS, MASTER, GRADIENT = 8, 4, 4  # bytes a parameter, all in fp32


@attrs.frozen
class Share:
    """A rank's part of the model.

    Attributes:
        dense, experts: parameters.
        layers: of all its (virtual) stages.
        first, last: whether it has the first and the last stage.
    """

    dense: int
    experts: int
    layers: tuple[Layer, ...]
    first: bool
    last: bool

    @classmethod
    def of(cls, config: MegatronConfig, shape: DecoderShape, stage: int) -> Share:
        """Of a rank in a pipeline stage; ranks of one stage have equal shares."""
        tp, pp = config.tensor_parallel, config.pipeline_parallel
        layers = tuple(shape.layers[number] for number in layer_numbers(config, len(shape.layers), stage))
        first, last = stage == 0, stage == pp - 1
        multiple = config.vocab_multiple * tp
        embedding = -(-shape.vocab // multiple) * multiple * shape.hidden // tp
        # A tied head is the embedding where both are in one stage, else the last stage has a copy.
        tables = int(first) + int(last and not (first and shape.tied))
        dense = sum(layer.sharded // tp + layer.whole for layer in layers) + tables * embedding + last * shape.hidden
        experts = sum(layer.experts for layer in layers) // (config.expert_parallel * config.expert_tensor_size)
        return cls(dense, experts, layers, first, last)


def layer_numbers(config: MegatronConfig, num_layers: int, stage: int) -> list[int]:
    """Which layers the ranks of a pipeline stage have, by virtual stage."""
    chunks = [number // config.virtual_stages for number in config.stage_layers(num_layers) or ()]
    starts = [turn * sum(chunks) + sum(chunks[:stage]) for turn in range(config.virtual_stages)]
    return [number for start in starts for number in range(start, start + chunks[stage])]


def memory(config: MegatronConfig, world_size: int, model: ModelFacts, load: Load) -> Sequence[Memory]:
    """By phase, of the rank `load.rank`: stages differ.

    Gradients are one flat fp32 buffer, which stays; with `offload_parameters` it is there in training only. Experts are
    taken to get equal numbers of tokens.

    Raises:
        Refused: as the planner; see DecoderShape.of too.
    """
    config = config.on(load.device)
    planned = plan(config, world_size, model)
    shape, size = DecoderShape.of(model), DTYPE_BYTES[config.dtype]
    stage = planned.layout.coordinates(load.rank)["pp"]
    share = Share.of(config, shape, stage)
    num = share.dense + share.experts
    optimizer = 0
    if config.trainable:
        dense_ranks = planned.layout.size("dp") * planned.layout.size("cp") if config.distributed_optimizer else 1
        expert_ranks = planned.views[EXPERT].size("edp") if config.distributed_optimizer else 1
        own = -(-share.dense // dense_ranks) + -(-share.experts // expert_ranks)
        optimizer = own * (MOMENTS + (MASTER if size < MASTER else 0))
    idle = Memory(
        Phase.IDLE, parameters=num * size, gradients=num * GRADIENT if config.trainable else 0, optimizer=optimizer
    )
    tokens = -(-load.micro_batch_tokens // config.context_parallel)
    one = _pass(config, shape, share, tokens, size)
    full_tensor = 2 * shape.largest_tensor * size
    phases = [
        attrs.evolve(idle, phase=Phase.LOAD, activations=shape.largest_tensor * size),
        attrs.evolve(idle, phase=Phase.EVAL, activations=one.forward_only),
        attrs.evolve(idle, phase=Phase.EXPORT, activations=full_tensor),
    ]
    if config.trainable:
        activations = int(one.kept * in_flight(config, stage, load.num_micro_batches))
        turning = activations + one.logits + one.logits_gradient
        phases.append(attrs.evolve(idle, phase=Phase.TRAIN, activations=max(turning, activations + one.working)))
    return [_with_offload(config, each, load) for each in (idle, *phases)]


def in_flight(config: MegatronConfig, stage: int, num_micro_batches: int) -> float:
    """How many micro-batches' worth of its layers' activations a stage holds at most, by megatron's 1F1B schedules.

    With virtual stages a rank runs (pp - stage - 1) * 2 + (v - 1) * pp chunks ahead of its first backward.
    """
    pp, virtual = config.pipeline_parallel, config.virtual_stages
    if virtual == 1:
        return min(num_micro_batches, pp - stage)
    ahead = (pp - stage - 1) * 2 + (virtual - 1) * pp
    return min(num_micro_batches * virtual, ahead + 1) / virtual


def _pass(config: MegatronConfig, shape: DecoderShape, share: Share, tokens: int, size: int) -> PassMemory:
    one = PassMemory.of(
        shape,
        tokens,
        size,
        layers=share.layers,
        recomputed=config.recompute_layers if config.recompute == "full" else 0,
        tensor_parallel=config.tensor_parallel,
        sequence_parallel=bool(config.sequence_parallel),
    )
    return one if share.last else attrs.evolve(one, logits=0, logits_gradient=0)


def _with_offload(config: MegatronConfig, memory: Memory, load: Load) -> Memory:
    """Where parts are on the CPU outside of the modes that need them. Gradients are not kept there."""
    if load.device == "cpu":
        return memory
    away = 0
    if memory.phase not in (Phase.IDLE, Phase.EVAL, Phase.EXPORT):
        return memory
    if config.offload_optimizer:
        away += memory.optimizer
        memory = attrs.evolve(memory, optimizer=0)
    if config.offload_parameters:
        memory = attrs.evolve(memory, gradients=0)
        if memory.phase == Phase.IDLE:
            away += memory.parameters
            memory = attrs.evolve(memory, parameters=0)
    return attrs.evolve(memory, host=away)
