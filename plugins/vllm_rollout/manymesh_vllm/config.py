"""Options of the rollout. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import attrs

from core.config import RolloutConfig
from core.errors import ConfigError
from core.model_facts import ModelFacts

FORWARD_TOKENS = 8192  # of one forward pass, unless told otherwise
CPU_KV_CACHE_MB = 512  # by itself vLLM would take most of a machine's memory

# What the rollout says to vLLM itself, and which of our options says it.
OURS = {
    "model": "model",
    "load_format": "load",
    "dtype": "dtype",
    "seed": "seed",
    "tensor_parallel_size": "tensor_parallel",
    "pipeline_parallel_size": "",
    "data_parallel_size": "",
    "distributed_executor_backend": "",
    "skip_tokenizer_init": "",
    "generation_config": "",
    "logprobs_mode": "",
    "enable_chunked_prefill": "cut_prompts",
    "speculative_config": "",
    "enable_batch_sharded_sampling": "",
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "kv_cache_memory_bytes": "kv_cache_mb",
    "enable_prefix_caching": "enable_prefix_caching",
    "enforce_eager": "enforce_eager",
    "enable_sleep_mode": "sleep_mode",
}


@attrs.frozen
class VllmRolloutConfig(RolloutConfig):
    """Rollout with vLLM in the worker's own process, or of a server beside it.

    Attributes:
        tensor_parallel: ranks that hold one copy of the model together; the world is dp copies of it. Of a server, the
            processes of each replica.
        max_model_len: tokens of prompt and response together; None for the model's own context, which may be much: vLLM
            keeps room for a forward pass of as many.
        max_num_seqs: rows that run at once; the others wait.
        max_num_batched_tokens: tokens of one forward pass; None for 8192. Where prompts are not cut, at least
            max_model_len, and None for the larger of the two.
        cut_prompts: a long prompt is computed in several forward passes (vLLM's chunked prefill). None for True on GPUs
            and False on CPU, where vLLM's model runner draws a row's tokens from a generator that moves with each pass.
        gpu_memory_utilization: share of a GPU's memory for weights, activations and KV cache; the trainer has the rest.
        kv_cache_mb: size of the KV cache, MiB; None for what gpu_memory_utilization leaves, and for 512 on CPU.
        enable_prefix_caching: prompts that begin alike are computed once. Dropped at every weight update.
        enforce_eager: no compilation, no CUDA graphs; None for False on GPU and True on CPU.
        sleep_mode: let release() free memory; only on CUDA.
        vllm: further arguments of vLLM's LLM, as they are.
    """

    tensor_parallel: int = 1
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    cut_prompts: bool | None = None
    gpu_memory_utilization: float = 0.5
    kv_cache_mb: int | None = None
    enable_prefix_caching: bool = True
    enforce_eager: bool | None = None
    sleep_mode: bool = True
    vllm: Mapping[str, Any] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        for name in ("tensor_parallel", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_mb"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is a number of things", have=value, want="at least 1")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                "gpu_memory_utilization is a share", have=self.gpu_memory_utilization, want="above 0, at most 1"
            )
        if self.cut_prompts is False and self.max_model_len:
            _check_holds(self.max_num_batched_tokens, self.max_model_len)
        conflicts = sorted(set(self.vllm) & set(OURS))
        if conflicts:
            reasons = [
                f"{name} by the option {OURS[name]}" if OURS[name] else f"{name} by the rollout" for name in conflicts
            ]
            raise ConfigError("these arguments of vLLM are set elsewhere", have=", ".join(reasons), where="vllm")

    def on(self, device: str) -> Self:
        there = super().on(device)
        return attrs.evolve(there, cut_prompts=device != "cpu") if there.cut_prompts is None else there


@attrs.frozen
class VllmServerConfig(VllmRolloutConfig):
    """Rollout with vLLM in a process of its own beside each rank.

    Attributes:
        cut_prompts: False, on any device: which log-probabilities a request asks for is known to vLLM's first model
            runner alone.
    """

    cut_prompts: bool | None = False

    def __attrs_post_init__(self) -> None:
        if self.cut_prompts is not False:
            raise ConfigError("a server doesn't cut prompts", have=f"cut_prompts {self.cut_prompts}", want="false")
        super().__attrs_post_init__()


def forward_tokens(config: VllmRolloutConfig, model: ModelFacts) -> int:
    """Tokens of one forward pass, at least a whole row where prompts are not cut.

    Args:
        config: as it holds on its device (`on`).

    Raises:
        ConfigError: a pass of these options doesn't hold the longest prompt, which is not cut.
    """
    if config.cut_prompts:
        return config.max_num_batched_tokens or FORWARD_TOKENS
    context = config.max_model_len or model.get("max_position_embeddings") or FORWARD_TOKENS
    _check_holds(config.max_num_batched_tokens, context)
    return config.max_num_batched_tokens or max(context, FORWARD_TOKENS)


def _check_holds(num_tokens: int | None, context: int) -> None:
    if num_tokens is not None and num_tokens < context:
        raise ConfigError(
            "prompts are not cut, so that a forward pass must hold the longest",
            have=f"max_num_batched_tokens {num_tokens}, context {context}",
            want=f"max_num_batched_tokens of at least {context}",
            mend="raise it, lower max_model_len, or set cut_prompts where the rollout allows it",
        )
