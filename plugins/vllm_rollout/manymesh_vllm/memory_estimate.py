"""What the rollouts hold of a device's memory, told from config.json and options. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence

from core.errors import Refused
from core.memory import Load, Memory, Phase
from core.model_facts import ModelFacts
from manymesh.parts.decoder_shape import DTYPE_BYTES, DecoderShape
from manymesh_vllm.config import CPU_KV_CACHE_MB, VllmRolloutConfig, forward_tokens

MIB = 2**20
VOCAB_MULTIPLE = 64  # to which vLLM pads the vocabulary
LOGITS_AT_ONCE = 3  # fp32 copies of the sampled positions'


def memory(config: VllmRolloutConfig, world_size: int, model: ModelFacts, load: Load) -> Sequence[Memory]:
    """By phase, of any rank: each has its part of one copy of the model.

    On GPUs without `kv_cache_mb` vLLM takes `gpu_memory_utilization` of the device: weights, one forward pass, and the
    KV cache from what that leaves. CUDA graphs come on top and are not counted.

    Raises:
        Refused: see DecoderShape.of; or the share leaves no KV cache for one row.
    """
    config = config.on(load.device)
    shape, size, tp = DecoderShape.of(model), DTYPE_BYTES[config.dtype], config.tensor_parallel
    weights = rank_weights(shape, tp) * size
    tokens = forward_tokens(config, model)
    forward = tokens * max(shape.working(layer, size, tp) for layer in shape.layers)
    logits = config.max_num_seqs * shape.vocab * (size + 4 * LOGITS_AT_ONCE)
    activations = max(forward, logits)
    by_token = shape.kv_cache(size, tp)
    if config.kv_cache_mb or load.device == "cpu":
        cache = (config.kv_cache_mb or CPU_KV_CACHE_MB) * MIB
    elif load.device_bytes is not None:
        cache = int(config.gpu_memory_utilization * load.device_bytes) - weights - activations
    else:
        cache = min(load.rows, config.max_num_seqs) * load.row_tokens * by_token
    if cache < load.row_tokens * by_token:
        raise Refused(
            "the rollout's memory doesn't hold the KV cache of one row",
            have=f"{cache / MIB:,.0f} MiB, beside {weights / MIB:,.0f} MiB of weights and "
            f"{activations / MIB:,.0f} MiB of one forward pass of {tokens} tokens",
            want=f"{load.row_tokens * by_token / MIB:,.0f} MiB for {load.row_tokens} tokens",
            mend="raise gpu_memory_utilization or tensor_parallel, or lower max_model_len",
        )
    phases = [
        Memory(Phase.LOAD, parameters=weights, activations=activations, kv_cache=cache),
        Memory(Phase.IDLE, parameters=weights, kv_cache=cache),
        Memory(Phase.GENERATE, parameters=weights, activations=activations, kv_cache=cache),
    ]
    return [*phases, Memory(Phase.RELEASED)] if load.device != "cpu" and config.sleep_mode else phases


def rank_weights(shape: DecoderShape, tensor_parallel: int) -> int:
    """Parameters of one rank: matrices, experts and vocabulary are cut, norms and routers are not; with more ranks than
    key-value heads each has one whole head."""
    multiple = VOCAB_MULTIPLE * tensor_parallel
    vocab = -(-shape.vocab // multiple) * multiple
    outside = vocab * shape.hidden // tensor_parallel * (1 if shape.tied else 2) + shape.hidden
    doubled = 2 * max(0, tensor_parallel - shape.kv_heads) * shape.head_dim * shape.hidden
    layers = sum((layer.sharded + doubled + layer.experts) // tensor_parallel + layer.whole for layer in shape.layers)
    return outside + layers
