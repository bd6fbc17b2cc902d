"""What SGLang is started with. Imports no SGLang: the arguments may go to another process."""

from __future__ import annotations

from typing import Any

import torch

from core.errors import ManymeshError
from core.manifest import ModelFacts
from manymesh_sglang.config import SglangRolloutConfig
from manymesh_sglang.sampler_protocol import SWITCH

CPU_KV_TOKENS = 16384
SPARE = 8  # tokens that SGLang keeps free of a context, and of the KV cache


def context(config: SglangRolloutConfig, facts: ModelFacts) -> int:
    """Tokens of prompt and response together."""
    return config.max_model_len or facts.get("max_position_embeddings") or 8192


def arguments(
    config: SglangRolloutConfig, facts: ModelFacts, device: torch.device, *, has_tokenizer: bool
) -> dict[str, Any]:
    """Keywords of SGLang's ServerArgs."""
    on_cpu = device.type == "cpu"
    length = context(config, facts)
    options: dict[str, Any] = {
        "model_path": facts.path,
        "dtype": config.dtype,
        "random_seed": config.seed,
        "device": device.type,
        "base_gpu_id": device.index or 0,
        "tp_size": 1,
        "context_length": length + SPARE,
        "max_running_requests": config.max_num_seqs,
        "max_total_tokens": config.kv_cache_tokens,
        "mem_fraction_static": config.gpu_memory_utilization,
        "disable_radix_cache": not config.enable_prefix_caching,
        "sampling_defaults": "openai",  # a checkpoint's top_k or penalties must not slip in
        "skip_tokenizer_init": not has_tokenizer,
        "incremental_streaming_output": True,
        "grammar_backend": "none",
        "weight_version": "0",
        "skip_server_warmup": True,
        "log_level": "warning",
    }
    if on_cpu:
        options |= {
            "attention_backend": "torch_native",
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
            "sleep_on_idle": True,  # its loop would take a core from the trainer
            "max_total_tokens": config.kv_cache_tokens or max(CPU_KV_TOKENS, length + SPARE),
            "mem_fraction_static": 0.3,  # of the host's memory, and an upper bound only
        }
    else:
        options |= {"disable_cuda_graph": bool(config.enforce_eager), "enable_memory_saver": config.sleep_mode}
    return options | dict(config.sglang)


def environment(device: torch.device) -> dict[str, str]:
    """Variables that SGLang's processes need."""
    needed = {SWITCH: "1", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}  # for SPARE; no token stands there
    if device.type == "cpu":
        needed["SGLANG_USE_CPU_ENGINE"] = "1"
    return needed


def died(explanation: str = "") -> ManymeshError:
    return ManymeshError(
        "SGLang's process has died", have=explanation or None, mend="look at its log; build a new rollout"
    )
