"""One vLLM engine inside a process that is a training rank too: it is built into the world that is there.

vLLM by itself starts processes of its own, makes or destroys torch.distributed's world, and reads its place from the
environment. Here it may do none of this.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import vllm.v1.engine.core as engine_core
from vllm import LLM
from vllm.distributed import parallel_state
from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from core.errors import Refused
from core.manifest import ModelFacts
from manymesh.parts.environment import environment_of
from manymesh.parts.requests import RequestCheck
from manymesh.parts.rollout_checks import cannot_run
from manymesh_vllm.config import CPU_KV_CACHE_MB, VllmRolloutConfig, forward_tokens

_engines: weakref.WeakSet[LocalEngine] = weakref.WeakSet()  # they share vLLM's groups, which are globals


class LocalEngine:
    """vLLM's LLM, and the one worker that it has in this process.

    Collective where the world has several ranks: all build theirs in lockstep. torch.distributed comes first, since
    vLLM otherwise makes a world of this one process, and no other library finds the real one afterwards.

    Attributes:
        llm: vllm.LLM.
        worker: vLLM's worker; `worker.model_runner` runs the model.
        check: what requests are checked against.

    Raises:
        Refused: vLLM doesn't take the model or the options, or another engine of this process is cut otherwise.
    """

    def __init__(self, config: VllmRolloutConfig, facts: ModelFacts, device: torch.device) -> None:
        self.check = RequestCheck.of(facts.path)
        self.groups = (config.tensor_parallel, bool(facts.num_experts))
        _check_groups(self.groups)
        self._owns_world = not dist.is_initialized()
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        executor = {}
        if not self._owns_world and dist.get_world_size() > 1:
            executor = {"distributed_executor_backend": "external_launcher"}
            environment |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(device.index or 0)}
        with environment_of(environment):
            check_platform(facts, device)
            try:
                with _shared_memory_of_this_world():
                    options = arguments(config, facts, device, has_tokenizer=self.check.has_tokenizer)
                    self.llm = LLM(**options, **executor)
            except (ValueError, NotImplementedError) as error:
                raise cannot_run("vLLM", facts, error) from error
        check_streams(self.llm.llm_engine.vllm_config)
        # Left alone, garbage collection would end torch.distributed's world.
        self._client = self.llm.llm_engine.engine_core
        self._client._finalizer.detach()
        [worker] = self.llm.collective_rpc(lambda worker: worker)
        self.worker = getattr(worker, "worker", worker)
        _engines.add(self)

    def drop_caches(self) -> bool:
        """Forget the KV cache of earlier prompts; False where some of it is in use."""
        return bool(self.llm.reset_prefix_cache())

    def shutdown(self) -> None:
        """Let go of the model; the world stays, unless vLLM made it."""
        _engines.discard(self)
        ends_world = engine_core.cleanup_dist_env_and_memory
        if not self._owns_world:
            engine_core.cleanup_dist_env_and_memory = _close_groups
        try:
            self._client.engine_core.shutdown()
        finally:
            engine_core.cleanup_dist_env_and_memory = ends_world
        del self.llm, self.worker, self._client


def arguments(
    config: VllmRolloutConfig, facts: ModelFacts, device: torch.device, *, has_tokenizer: bool
) -> dict[str, Any]:
    """What LLM is called with. Options of the config that are None are left to vLLM, where it does right."""
    on_cpu = device.type == "cpu"
    # vLLM's own all-reduce addresses the GPUs of its tensor-parallel group by number, and ends in an IndexError where
    # this process doesn't see them. NCCL's is slower when few rows decode.
    hides_peers = not on_cpu and torch.cuda.device_count() < config.tensor_parallel
    kv_cache_mb = config.kv_cache_mb or (CPU_KV_CACHE_MB if on_cpu else None)
    return {
        "model": facts.path,
        "dtype": config.dtype,
        "seed": config.seed,
        "tensor_parallel_size": config.tensor_parallel,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "enable_chunked_prefill": bool(config.cut_prompts),
        "max_num_batched_tokens": forward_tokens(config, facts),
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "kv_cache_memory_bytes": kv_cache_mb * 2**20 if kv_cache_mb else None,
        "enable_prefix_caching": config.enable_prefix_caching,
        "enforce_eager": on_cpu if config.enforce_eager is None else config.enforce_eager,
        "enable_sleep_mode": config.sleep_mode and not on_cpu,
        "skip_tokenizer_init": not has_tokenizer,
        "generation_config": "vllm",  # a checkpoint's top_k or penalties must not slip in
        "logprobs_mode": "raw_logprobs",
        "max_logprobs": -1,  # scores may ask for any number
        "disable_log_stats": True,
        "disable_custom_all_reduce": hides_peers,
        "load_format": "auto" if config.load == "checkpoint" else "dummy",
        **config.vllm,
    }


def check_streams(vllm_config: Any) -> None:
    """Raises Refused where prompts are cut and vLLM runs the model with its first runner.

    That one draws a row's token from a generator once a forward pass, so that a prompt in two passes shifts the row's
    stream. The second takes a token's noise from its seed and place alone (vllm/v1/worker/gpu/sample/gumbel.py).
    """
    if vllm_config.scheduler_config.enable_chunked_prefill and not vllm_config.use_v2_model_runner:
        raise Refused(
            "this vLLM cannot cut prompts and keep a stream of randomness for each row",
            have="cut_prompts, and vLLM's first model runner",
            mend="set cut_prompts to false, and max_model_len to what a forward pass can hold",
        )


def score_limits(model_config: Any) -> tuple[int, int]:
    """Size of the vocabulary, and tokens of the longest sequence to score: vLLM samples a token behind it."""
    return model_config.get_vocab_size(), model_config.max_model_len - 1


def check_platform(facts: ModelFacts, device: torch.device) -> None:
    """Raises Refused where this build of vLLM is for other devices, or has no attention for the model's heads."""
    if current_platform.device_type != device.type:
        raise Refused(
            f"this build of vLLM is for {current_platform.device_type}",
            have=f"device {device.type}",
            mend="install manymesh-vllm[gpu] on GPUs, manymesh-vllm[cpu] elsewhere; or set the device",
        )
    # On CPU vLLM finds out about heads at the first forward pass, and dies.
    if device.type != "cpu":
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    hidden, heads = facts.get("hidden_size"), facts.num_heads
    size = facts.get("head_dim") or (hidden // heads if hidden and heads else None)
    legal = CPUAttentionBackend.get_supported_head_sizes()
    if size is not None and size not in legal:
        raise Refused(
            "vLLM's attention on CPU doesn't have this head size",
            have=size,
            want=f"one of {legal}",
            where=f"head_dim of {facts.path!r}",
            mend="use another rollout for this model, or a GPU",
        )


def _check_groups(layout: tuple[int, bool]) -> None:
    layouts = {engine.groups for engine in _engines}
    if layouts - {layout}:
        raise Refused(
            "vLLM engines of one process share its groups, since vLLM keeps them in globals",
            have=f"{sorted(layouts)} (tensor_parallel, with experts)",
            want=layout,
            mend="shut the other rollout down first, or give them processes of their own",
        )


@contextmanager
def _shared_memory_of_this_world() -> Iterator[None]:
    """Give vLLM's ranks a name in shared memory that no other world on this machine has.

    On CPU vLLM names it after the address at which torch.distributed is opened, and takes "env://" for every world
    that others have opened.
    """
    token = [secrets.token_hex(8)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(token, src=0)
    original = ExecutorWithExternalLauncher._distributed_args

    def named(executor: Any) -> tuple[str, int, int]:
        address, rank, local_rank = original(executor)
        return f"{address}:{token[0]}", rank, local_rank

    ExecutorWithExternalLauncher._distributed_args = named
    try:
        yield
    finally:
        ExecutorWithExternalLauncher._distributed_args = original


def _close_groups() -> None:
    """vLLM's own groups, once nobody uses them, so that the next engine may be sharded otherwise."""
    if not _engines:
        parallel_state.destroy_model_parallel()
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
        parallel_state._WORLD = parallel_state._NODE_COUNT = None
