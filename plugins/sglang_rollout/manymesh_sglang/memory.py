"""What the rollouts hold of a device's memory, told from config.json and options. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence

from core.errors import Refused
from core.memory import Load, Memory, Phase
from core.model_facts import ModelFacts
from manymesh.parts.decoder_shape import DTYPE_BYTES, DecoderShape
from manymesh_sglang.config import CPU_KV_TOKENS, SPARE, SglangRolloutConfig, context

MIB = 2**20
PREFILL_TOKENS = 8192  # of one forward pass: SGLang cuts longer prompts (chunked_prefill_size, by the GPU's size)
LOGITS_AT_ONCE = 6  # fp32 copies of the sampled positions', in our sampler


def memory(config: SglangRolloutConfig, world_size: int, model: ModelFacts, load: Load) -> Sequence[Memory]:
    """By phase, of any rank. On GPUs without `kv_cache_tokens` weights and KV cache are `gpu_memory_utilization` of the
    device. A forward pass comes on top, and CUDA graphs, which are not counted.

    Raises:
        Refused: see DecoderShape.of; or the share leaves no KV cache for one row.
    """
    config = config.on(load.device)
    shape, size, tp = DecoderShape.of(model), DTYPE_BYTES[config.dtype], config.tensor_parallel
    num_sharded = shape.num_parameters - sum(layer.whole for layer in shape.layers)
    weights = (shape.num_parameters - num_sharded + num_sharded // tp) * size
    forward = min(PREFILL_TOKENS, load.rows * load.prompt_tokens)
    activations = max(
        forward * max(shape.working(layer, size, tp) for layer in shape.layers),
        min(load.rows, config.max_num_seqs) * shape.vocab * (size + 4 * LOGITS_AT_ONCE),
    )
    by_token = shape.kv_cache(size, tp)
    if config.kv_cache_tokens:
        cache = config.kv_cache_tokens * by_token
    elif load.device == "cpu":
        cache = max(CPU_KV_TOKENS, context(config, model) + SPARE) * by_token
    elif load.device_bytes is not None:
        cache = int(config.gpu_memory_utilization * load.device_bytes) - weights
    else:
        cache = min(load.rows, config.max_num_seqs) * load.row_tokens * by_token
    if cache < load.row_tokens * by_token:
        raise Refused(
            "the rollout's memory doesn't hold the KV cache of one row",
            have=f"{cache / MIB:,.0f} MiB, beside {weights / MIB:,.0f} MiB of weights",
            want=f"{load.row_tokens * by_token / MIB:,.0f} MiB for {load.row_tokens} tokens",
            mend="raise gpu_memory_utilization or kv_cache_tokens, or lower max_model_len",
        )
    phases = [
        Memory(Phase.LOAD, parameters=weights, kv_cache=cache),
        Memory(Phase.IDLE, parameters=weights, kv_cache=cache),
        Memory(Phase.GENERATE, parameters=weights, activations=activations, kv_cache=cache),
    ]
    return [*phases, Memory(Phase.RELEASED)] if load.device != "cpu" and config.sleep_mode else phases
