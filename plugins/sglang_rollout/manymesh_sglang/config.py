"""Options of the rollouts. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from core.config import RolloutConfig
from core.errors import ConfigError
from core.model_facts import ModelFacts

CPU_KV_TOKENS = 16384  # of the KV cache on CPU, unless told otherwise
SPARE = 8  # tokens that SGLang keeps free of a context, and of the KV cache

# What the rollouts say to SGLang themselves, and which of our options says it.
OURS = {
    "model_path": "model",
    "load_format": "load",
    "dtype": "dtype",
    "random_seed": "seed",
    "tp_size": "tensor_parallel",
    "pp_size": "",
    "dp_size": "",
    "device": "",
    "base_gpu_id": "",
    "sampling_backend": "",
    "sampling_defaults": "",
    "skip_tokenizer_init": "",
    "incremental_streaming_output": "",
    "weight_version": "",
    "speculative_algorithm": "",
    "context_length": "max_model_len",
    "max_running_requests": "max_num_seqs",
    "max_total_tokens": "kv_cache_tokens",
    "mem_fraction_static": "gpu_memory_utilization",
    "disable_radix_cache": "enable_prefix_caching",
    "disable_cuda_graph": "enforce_eager",
    "enable_memory_saver": "sleep_mode",
    "host": "",
    "port": "port",
    "api_key": "api_key",
}
COUNTS = ("tensor_parallel", "max_model_len", "max_num_seqs", "kv_cache_tokens")
SECONDS = ("start_timeout_s", "update_timeout_s")


@attrs.frozen
class SglangRolloutConfig(RolloutConfig):
    """Rollout with SGLang's Engine, held by the worker's own process.

    Attributes:
        tensor_parallel: processes of SGLang's own, beside each rank, that hold its copy of the model together, with a
            GPU each: the pool has as many gpus_per_process. Of servers in `addresses`, what they were started with.
        max_model_len: tokens of prompt and response together; None for the model's own context.
        max_num_seqs: rows that run at once; the others wait.
        kv_cache_tokens: size of the KV cache; None for what gpu_memory_utilization leaves, and for 16384 on CPU (or a
            context, if that is more).
        gpu_memory_utilization: share of all of a GPU's memory for weights and KV cache, whatever the trainer holds when
            SGLang starts; the trainer, and SGLang's forward passes, have the rest.
        enable_prefix_caching: prompts that begin alike are computed once. Dropped at every weight update.
        enforce_eager: no CUDA graphs; None for False on GPU. There are none on CPU.
        sleep_mode: let release() free memory; only on CUDA.
        start_timeout_s: until the engine must be there.
        update_timeout_s: for each step of a weight update.
        sglang: further arguments of SGLang's ServerArgs, as they are.
    """

    tensor_parallel: int = 1
    max_model_len: int | None = None
    max_num_seqs: int = 256
    kv_cache_tokens: int | None = None
    gpu_memory_utilization: float = 0.5
    enable_prefix_caching: bool = True
    enforce_eager: bool | None = None
    sleep_mode: bool = True
    start_timeout_s: float = 600.0
    update_timeout_s: float = 300.0
    sglang: Mapping[str, Any] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is a number of things", have=value, want="at least 1")
        for name in SECONDS:
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is a time", have=getattr(self, name), want="above 0 seconds")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                "gpu_memory_utilization is a share", have=self.gpu_memory_utilization, want="above 0, at most 1"
            )
        conflicts = sorted(set(self.sglang) & set(OURS))
        if conflicts:
            reasons = [
                f"{name} by the option {OURS[name]}" if OURS[name] else f"{name} by the rollout" for name in conflicts
            ]
            raise ConfigError("these arguments of SGLang are set elsewhere", have=", ".join(reasons), where="sglang")


@attrs.frozen
class SglangServerConfig(SglangRolloutConfig):
    """Rollout with an SGLang server: one of the worker's own, or one that somebody else runs.

    Attributes:
        weights: how weights reach the server: "distributed", by a collective of this process and the server's;
            "tensor", in memory of this host or GPU that both open; "disk", by a checkpoint in `weights_dir`. None for
            "tensor" to a server of the worker's own on CUDA, where a collective would pass through the host, and
            "distributed" elsewhere.
        weights_dir: for "disk": a directory that the server sees too; None for a temporary one of this host.
        port: of the server on loopback; 0 for one of the system's choice.
        addresses: "host:port" of running servers, one a rank. None is started then, and none is ended. They must have
            manymesh-sglang installed, and MANYMESH_SGLANG_SAMPLER=1 in their environment.
        api_key: of those servers; None where they want none. A server of the worker's own has a key of its own.
        host: by which the servers of `addresses` reach this process, for "distributed".
    """

    weights: Literal["distributed", "tensor", "disk"] | None = None
    weights_dir: str | None = None
    port: int = 0
    addresses: tuple[str, ...] = ()
    api_key: str | None = attrs.field(default=None, repr=False)
    host: str = "127.0.0.1"

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if not 0 <= self.port < 2**16:
            raise ConfigError("there is no such port", have=self.port, want="0 (any free one) to 65535")
        for address in self.addresses:
            name, _, port = address.rpartition(":")
            if not name or not port.isdecimal() or "/" in address:
                raise ConfigError("an address of a server is host:port", have=address, where="addresses")
        if self.addresses and self.port:
            raise ConfigError("port is of a server that is started, addresses of those that run", have=self.port)
        if self.addresses and self.weights == "tensor":
            raise ConfigError(
                "weights in shared memory reach a server of the worker's own alone",
                have="weights 'tensor' with addresses",
                want="'distributed' or 'disk'",
            )
        if self.addresses and self.weights == "disk" and self.weights_dir is None:
            raise ConfigError(
                "weights by disk want a directory that the server sees too", where="weights_dir", mend="set weights_dir"
            )

    def upload(self, device: str) -> Literal["distributed", "tensor", "disk"]:
        """How weights reach the server of a rank on this type of device."""
        if self.weights is not None:
            return self.weights
        return "tensor" if device == "cuda" and not self.addresses else "distributed"


def context(config: SglangRolloutConfig, model: ModelFacts) -> int:
    """Tokens of prompt and response together."""
    return config.max_model_len or model.get("max_position_embeddings") or 8192
