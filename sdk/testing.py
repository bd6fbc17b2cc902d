"""Help for tests of engines and rollouts: a world of real ranks on one machine, tiny models and tokenizers made on the
spot."""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import string
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from core.device import connect_store, join_world, open_listener

PRELOAD = [
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "tensordict",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.generation.utils",
    "ray.cloudpickle",
]


def preload(*modules: str) -> None:
    """Have the server of all pools import these once, for engines that take long to import. Call it from a conftest:
    it counts for pools that start later, and only until the first one has."""
    PRELOAD.extend(each for each in modules if each not in PRELOAD)


class RankPool:
    """Processes that form one gloo world and run functions on all ranks. Start it once a session: ranks import torch.

    Example:
        with RankPool(2) as ranks:
            assert ranks.run(lambda rank, world_size: rank) == [0, 1]
    """

    def __init__(self, world_size: int, *, timeout_s: float = 120.0) -> None:
        self.world_size, self._timeout_s = world_size, timeout_s
        # Ranks are forked from a server that has imported all this once; by themselves each would take seconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOAD))
        self._pipes: list[Connection] = []
        self._processes = []
        listener = open_listener("127.0.0.1")
        port = listener.getsockname()[1]
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, world_size, port, listener if rank == 0 else None), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        listener.close()

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """`function(rank, world_size, *args, **kwargs)` on every rank; the results by rank.

        Raises:
            RuntimeError: a rank raised (with its traceback), died, or ran past the deadline. The pool is closed then,
                since the others may be blocked in a collective.
        """
        from ray import cloudpickle

        module = sys.modules.get(function.__module__)
        if module is not None and not _importable(module.__name__):
            cloudpickle.register_pickle_by_value(module)
        job = cloudpickle.dumps((function, args, kwargs))
        for pipe in self._pipes:
            pipe.send_bytes(job)
        results = [None] * self.world_size
        waiting = {id(pipe): rank for rank, pipe in enumerate(self._pipes)}
        while waiting:
            ready = multiprocessing.connection.wait([p for p in self._pipes if id(p) in waiting], self._timeout_s)
            if not ready:
                self.close()
                raise RuntimeError(f"ranks {sorted(waiting.values())} did not answer in {self._timeout_s} s")
            for pipe in (pipe for pipe in self._pipes if pipe in ready):
                rank = waiting.pop(id(pipe))
                try:
                    ok, value = cloudpickle.loads(pipe.recv_bytes())
                except EOFError:
                    ok, value = False, "its process died"
                if not ok:
                    self.close()
                    raise RuntimeError(f"rank {rank} failed:\n{value}")
                results[rank] = value
        return results

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Worlds:
    """Pools by size, each started when it is first asked for: `worlds(4, function, *args)`. One a session is enough.

    Args:
        alone_here: run functions for one rank in this process, which must have a world of one.
        timeout_s: see RankPool.
    """

    def __init__(self, *, alone_here: bool = False, timeout_s: float = 120.0) -> None:
        self._alone_here, self._timeout_s = alone_here, timeout_s
        self._pools: dict[int, RankPool] = {}

    def __call__(self, world_size: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """The results of function(rank, world_size, *args, **kwargs) by rank. Raises as RankPool.run; the next call
        gets new ranks then."""
        if world_size == 1 and self._alone_here:
            return [function(0, 1, *args, **kwargs)]
        if world_size not in self._pools:
            self._pools[world_size] = RankPool(world_size, timeout_s=self._timeout_s)
        try:
            return self._pools[world_size].run(function, *args, **kwargs)
        except BaseException:  # also an interrupt: its ranks are still at work, and their answers are for nobody
            self._pools.pop(world_size).close()
            raise

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def _importable(name: str) -> bool:
    """Whether the ranks' processes find the module by name; test modules often cannot be imported."""
    try:
        return name != "__main__" and importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _serve(pipe: Connection, rank: int, world_size: int, port: int, listener: Any) -> None:
    import torch
    from ray import cloudpickle

    torch.set_num_threads(1)
    os.environ.update(LOCAL_RANK=str(rank))  # its device, on a machine with some
    store = connect_store("127.0.0.1", port, listener=listener, num_ranks=world_size)
    join_world(rank, world_size, store, timeout_s=60)
    while True:
        try:
            function, args, kwargs = cloudpickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = (True, function(rank, world_size, *args, **kwargs))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send_bytes(cloudpickle.dumps(answer))
        del function, args, kwargs, answer
        _free_threads()


def _free_threads(limit: int = 200) -> None:
    """Engines that were shut down may be garbage in cycles with their process groups, which keep three threads each
    until it is collected; hundreds of them make a small machine slow."""
    tasks = Path("/proc/self/task")
    if tasks.is_dir() and sum(1 for _ in tasks.iterdir()) > limit:
        gc.collect()


def tiny_model(
    directory: str | Path,
    family: str = "qwen3",
    *,
    seed: int = 0,
    num_layers: int = 2,
    value_model: bool = False,
    **options: Any,
) -> str:
    """Write a random tiny causal LM of a family ("qwen3", "llama", "qwen2", "qwen3_moe") with save_pretrained.

    Args:
        value_model: a model of one label a token instead.
        options: of the family's config.

    Returns:
        the directory, as a string.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

    shape: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if family != "qwen2":
        shape["head_dim"] = 16
    if family == "qwen3_moe":
        shape |= {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
    if value_model:
        shape["num_labels"] = 1
    config = AutoConfig.for_model(family, **(shape | options))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        kind = AutoModelForTokenClassification if value_model else AutoModelForCausalLM
        model = kind.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory)
    return str(directory)


CHARACTERS = string.ascii_letters + string.digits[:9]


def character_tokenizer(directory: str | Path) -> None:
    """Write a tokenizer for tiny_model's 64 tokens: three special ones, then one character each."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>").save_pretrained(directory)


def characters(ids: Sequence[int]) -> str:
    """Tokens as that tokenizer writes them, special ones as question marks."""
    return "".join("?" if i < 3 else CHARACTERS[i - 3] for i in ids)
