"""What SGLang is started with. Imports no SGLang: the arguments may go to another process."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch

from core.errors import ManymeshError, Refused
from core.manifest import ModelFacts
from manymesh_sglang.config import CPU_KV_TOKENS, SPARE, SglangRolloutConfig, context
from manymesh_sglang.sampler_protocol import SWITCH

GIB = 2**30
BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
BINDING = "SGLANG_CPU_OMP_THREADS_BIND"  # by itself SGLang wants a node of memory for each process

_logger = logging.getLogger(__name__)


def arguments(
    config: SglangRolloutConfig, facts: ModelFacts, device: torch.device, *, has_tokenizer: bool
) -> dict[str, Any]:
    """Keywords of SGLang's ServerArgs.

    Raises:
        Refused: less of the GPU is free than the rollout shall have, or this process sees too few of them.
    """
    on_cpu = device.type == "cpu"
    if config.tensor_parallel > 1 and not on_cpu:
        check_devices(config.tensor_parallel, device.index or 0, torch.cuda.device_count())
    length = context(config, facts)
    options: dict[str, Any] = {
        "model_path": facts.path,
        "load_format": "auto" if config.load == "checkpoint" else "dummy",
        "dtype": config.dtype,
        "random_seed": config.seed,
        "device": device.type,
        "base_gpu_id": device.index or 0,
        "tp_size": config.tensor_parallel,
        "context_length": length + SPARE,
        "max_running_requests": config.max_num_seqs,
        "max_total_tokens": config.kv_cache_tokens,
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
        if config.dtype == "float32" and not set(config.sglang) & set(BACKENDS):
            _logger.warning(
                "dtype float32 on a GPU: SGLang's own choices of attention there (FlashAttention 3, FlashInfer) are "
                "made for 16 bits; should it fail, set dtype to auto or bfloat16, or sglang.attention_backend to triton"
            )
        free, total = torch.cuda.mem_get_info(device)
        options |= {
            "disable_cuda_graph": bool(config.enforce_eager),
            "enable_memory_saver": config.sleep_mode,
            "mem_fraction_static": share_of_free(config.gpu_memory_utilization, free, total),
        }
    return options | dict(config.sglang)


def share_of_free(share: float, free: int, total: int) -> float:
    """What SGLang takes as `mem_fraction_static`, which is of the memory that is free when it starts.

    Args:
        share: of all of the GPU's memory, for weights and KV cache.
        free, total: bytes.

    Raises:
        Refused: so much isn't free.
    """
    if share * total > free:
        raise Refused(
            "the GPU has less memory free than the rollout shall have",
            have=f"{free / GIB:.1f} of {total / GIB:.1f} GiB free",
            want=f"{share * total / GIB:.1f} GiB: gpu_memory_utilization {share}",
            mend=f"set gpu_memory_utilization to {int(free / total * 100) / 100} or less, or have the trainer in the "
            "same process offload its parameters and optimizer",
        )
    return share * total / free


def check_devices(tensor_parallel: int, first: int, num_visible: int) -> None:
    """SGLang gives its processes neighbouring devices. Raises Refused where there are not as many from `first` on."""
    if first + tensor_parallel > num_visible:
        raise Refused(
            "SGLang's processes have a GPU each, and are on the node of their rank",
            have=f"{num_visible} GPUs that this process sees, of which this rank's first is number {first}",
            want=f"tensor_parallel {tensor_parallel} of them",
            mend="give its pool as many gpus_per_process",
        )


def environment(device: torch.device, tensor_parallel: int = 1) -> dict[str, str]:
    """Variables that SGLang's processes need."""
    needed = {SWITCH: "1", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}  # for SPARE; no token stands there
    if device.type == "cpu":
        needed["SGLANG_USE_CPU_ENGINE"] = "1"
        if tensor_parallel > 1 and BINDING not in os.environ:
            needed[BINDING] = "|".join(shares_of_cores(sorted(os.sched_getaffinity(0)), tensor_parallel))
    return needed


def shares_of_cores(cores: Sequence[int], num_processes: int) -> list[str]:
    """Each process's cores, as "0,1": neighbours, and as many for each; where there are fewer cores than processes,
    some share one."""
    size = max(len(cores) // num_processes, 1)
    starts = [number * size % len(cores) for number in range(num_processes)]
    return [",".join(map(str, cores[start : start + size])) for start in starts]


def died(explanation: str = "") -> ManymeshError:
    return ManymeshError(
        "SGLang's process has died", have=explanation or None, mend="look at its log; build a new rollout"
    )
