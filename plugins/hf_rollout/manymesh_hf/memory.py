"""What the rollout holds of a device's memory, told from config.json and options. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence

from core.memory import Load, Memory, Phase
from core.model_facts import ModelFacts
from manymesh.parts.decoder_shape import DTYPE_BYTES, DecoderShape
from manymesh_hf.config import HfRolloutConfig

LOGITS_AT_ONCE = 6  # fp32 copies of the last position's, in the sampler


def memory(config: HfRolloutConfig, world_size: int, model: ModelFacts, load: Load) -> Sequence[Memory]:
    """By phase, of any rank. The KV cache lives no longer than a call of generate.

    Raises:
        Refused: see DecoderShape.of.
    """
    config = config.on(load.device)
    shape, size = DecoderShape.of(model), DTYPE_BYTES[config.dtype]
    weights = shape.num_parameters * size
    rows = min(load.rows, config.max_batch_rows or load.rows)
    # A step makes one layer's keys and values anew, longer by a token, before the old ones go.
    cache = rows * load.row_tokens * shape.kv_cache(size)
    cache += cache // len(shape.layers)
    prefill = rows * load.prompt_tokens * max(shape.working(layer, size) for layer in shape.layers)
    sampler = rows * shape.vocab * (size + 4 * LOGITS_AT_ONCE)
    host = 0 if load.device == "cpu" else weights  # read there, then moved
    return [
        Memory(Phase.LOAD, parameters=weights, host=host),
        Memory(Phase.IDLE, parameters=weights),
        Memory(Phase.GENERATE, parameters=weights, activations=max(prefill, sampler), kv_cache=cache),
        Memory(Phase.RELEASED),
    ]
