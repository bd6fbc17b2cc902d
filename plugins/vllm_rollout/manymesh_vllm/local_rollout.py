"""Rollout with vLLM inside the worker's process: the engine shares its world, its memory and its weights' names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.device_mesh import init_device_mesh

from core.device import choose_device
from core.engine import WeightSpec
from core.errors import ManymeshError, Refused
from core.manifest import ModelFacts
from core.mesh import RankMesh
from core.rollout import LogProbKind, MemoryTag, SamplingParams
from manymesh.parts.agreement import agree
from manymesh.parts.checkpoint_weights import read_checkpoint
from manymesh.parts.rollout_checks import (
    check_stop_strings,
    check_tags,
    eos_ids,
    has_tokenizer,
    load_tokenizer,
    no_update,
    not_initialized,
    stop_ids,
    valid_version,
)
from manymesh.parts.rollout_rows import Prompts, Responses
from manymesh.parts.row_seeds import row_keys
from manymesh.parts.weights import check_specs
from manymesh_vllm import sampling as asked
from manymesh_vllm.config import VllmRolloutConfig
from manymesh_vllm.local_engine import LocalEngine
from manymesh_vllm.memory import SleepingMemory
from manymesh_vllm.plan import TP, plan
from manymesh_vllm.weights import WeightUpdate

T = TypeVar("T")


class VllmRollout:
    """`core.rollout.Rollout` over vLLM, in this process.

    Versions: 0 after `initialize()`, the update's version after `finish_weight_update()`, None in between, after a
    failed update and after `release(["weights"])`, until a whole update was loaded.

    Where the world has several ranks, construction, `initialize`, `generate` and weight updates are collective over the
    ranks of one dp rank (`infer_tp`), and the first two over all.

    Args:
        config: options; `config.model` is the directory to load.
        device: "cpu", "cuda" or None for what the machine has.

    Raises:
        Refused: tensor_parallel doesn't fit the world.
    """

    def __init__(self, config: VllmRolloutConfig, device: str | None = None) -> None:
        self._config = config
        self._device = choose_device(device, int(os.environ.get("LOCAL_RANK", "0")))
        in_world = dist.is_available() and dist.is_initialized()
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if in_world else (0, 1)
        planned = plan(config, world_size, None)
        self._mesh = RankMesh(
            planned.layouts["dense"], rank, planned.route, self._groups(planned.layouts["dense"].sizes, in_world)
        )
        self._engine: LocalEngine | None = None
        self._memory: SleepingMemory | None = None
        self._expected: dict[str, torch.Tensor] = {}
        self._eos: tuple[int, ...] = ()
        self._has_tokenizer = False
        self._update: WeightUpdate | None = None
        self._version: int | None = None

    def _groups(self, sizes: tuple[int, ...], in_world: bool) -> Any:
        if not in_world:
            return None
        device_mesh = init_device_mesh(self._device.type, sizes, mesh_dim_names=("dp", TP))

        def group(*axes: str) -> Any:
            if set(axes) == {"dp", TP}:
                return dist.group.WORLD
            if axes not in (("dp",), (TP,)):
                raise Refused("the mesh has no such axes", have=axes, want=("dp", TP))
            return device_mesh.get_group(*axes)

        return group

    @property
    def mesh(self) -> RankMesh:
        return self._mesh

    @property
    def weight_version(self) -> int | None:
        return self._version

    def initialize(self) -> None:
        """Build the engine with the directory's weights, which are version 0. Collective over the world.

        Raises:
            Refused: no checkpoint is there, tensor_parallel doesn't cut it, or vLLM doesn't take it.
        """
        facts, self._expected = self._agreed(self._look)
        self._eos = eos_ids(facts.path)
        self._has_tokenizer = has_tokenizer(facts.path)
        self._engine = LocalEngine(self._config, facts, self._device, has_tokenizer=self._has_tokenizer)
        can_sleep = self._config.sleep_mode and self._device.type == "cuda"
        self._memory = SleepingMemory(self._engine.llm, can_sleep=can_sleep)
        self._update, self._version = None, 0

    def _look(self) -> tuple[ModelFacts, dict[str, torch.Tensor]]:
        """What the directory holds, and that it can be cut."""
        facts, expected = read_checkpoint(self._config.model)
        plan(self._config, self._mesh.layout.world_size, facts)
        return facts, expected

    def _agreed(self, function: Callable[[], T]) -> T:
        """The function's value here; all ranks refuse where one does, before any of them waits for the others."""
        refused: Refused | None = None
        try:
            value = function()
        except Refused as error:
            refused = error
        if self._mesh.groups is not None:
            agree(self._mesh.group("dp", TP), refused)
        if refused is not None:
            raise refused
        return value

    def generate(self, prompts: TensorDict, sampling: SamplingParams, *, min_version: int | None = None) -> TensorDict:
        """See `core.rollout.Rollout.generate`. Columns come back on the device of prompt_ids.

        Sample j of the prompt with prompt_id i (its row number where there is no such column) draws from
        (sampling.seed, i, j); without a seed, from fresh entropy. With temperature 0, log-probabilities RAW and
        TEMPERATURE are those of the untempered model, PROCESSED are 0, and the metadata `temperature` is 1.

        Collective over the ranks of one dp rank, which give the same rows.

        Raises:
            Refused: no valid weights, or older than min_version, or the KV cache is released; prompts that are empty,
                of another vocabulary, or that leave no room in the context; stop ids that the model doesn't have, stop
                strings without a tokenizer; raw log-probabilities at a temperature below 0.01.
            ManymeshError: the model gave logits that are not finite.
        """
        version = valid_version(self._version, min_version, self._state())
        engine, memory = self._ready()
        if memory.asleep:
            raise Refused("the KV cache is released", mend="resume(['kv_cache']) before generating")
        table = Prompts.read(prompts)
        model_config = engine.llm.llm_engine.model_config
        vocab_size = model_config.get_vocab_size()
        table.check(vocab_size, model_config.max_model_len, sampling.max_new_tokens)
        asked.check(sampling)
        ends = stop_ids(sampling, self._eos, vocab_size)
        check_stop_strings(sampling)
        if sampling.stop and not self._has_tokenizer:
            load_tokenizer(self._config.model)  # says what is missing
        sample = torch.arange(sampling.num_samples).repeat(len(table))
        table = table.repeat(sampling.num_samples)
        seeds, randomness = self._randomness(sampling, table, sample)
        rows = asked.requests(sampling, ends, len(table), seeds)
        texts = [{"prompt_token_ids": row.tolist()} for row in table.tokens.cpu().split(table.lengths.tolist())]
        with asked.log_probs_of(engine.worker.model_runner, sampling), randomness:
            outputs = engine.llm.generate(texts, rows, use_tqdm=False) if texts else []
        responses = Responses.behind(table, *asked.answers(outputs, sampling))
        if not bool(responses.log_probs.isfinite().all()):
            raise asked.not_finite(f"weight version {version}, rank {self._mesh.rank}")
        return responses.batch(
            table,
            weight_version=version,
            temperature=sampling.temperature or 1.0,
            log_prob_kind=LogProbKind(sampling.log_probs).value,
        )

    def _randomness(
        self, sampling: SamplingParams, prompts: Prompts, sample: torch.Tensor
    ) -> tuple[list[int] | None, AbstractContextManager[Any]]:
        """Seeds by row, and a generator for the rest: vLLM draws from the process's in either case, as trainers do."""
        if not sampling.temperature:
            return None, nullcontext()
        fresh = [int.from_bytes(os.urandom(8))]
        randomness = _own_generator(fresh[0], self._device)
        seed = sampling.seed
        if seed is None and self._mesh.layout.size(TP) == 1:
            return None, randomness  # one generator for all rows is faster
        if seed is None:
            dist.broadcast_object_list(fresh, group=self._mesh.group(TP), group_src=0)
            [seed] = fresh
        keys = row_keys(seed, prompts.prompt_id.cpu(), sample)
        return (keys >> 1).tolist(), randomness  # vLLM wants them in an int64

    def _state(self) -> str:
        if self._memory is None:
            return "not initialized"
        if "weights" in self._memory.asleep:
            return "weights released"
        return "a weight update under way" if self._update else "weights released or an update not finished"

    def release(self, tags: Sequence[MemoryTag]) -> None:
        """Free memory, on CUDA with sleep_mode.

        Weights are dropped, not moved, so that weight_version is None until they are resumed and a whole update was
        loaded.

        Raises:
            Refused: vLLM frees nothing on this device.
        """
        _, memory = self._ready()
        check_tags(tags)
        memory.check_can_sleep()
        if "weights" in tags:
            self.abort_weight_update()  # while its layers still have memory
            self._version = None
        memory.release(tags)

    def resume(self, tags: Sequence[MemoryTag]) -> None:
        """Take memory again; what is not released stays as it is. Weights hold garbage then, until a whole update."""
        _, memory = self._ready()
        check_tags(tags)
        memory.resume(tags)

    def _ready(self) -> tuple[LocalEngine, SleepingMemory]:
        if self._engine is None or self._memory is None:
            raise not_initialized()
        return self._engine, self._memory

    def begin_weight_update(self, specs: Sequence[WeightSpec], version: int) -> None:
        """See `core.rollout.Rollout`. An update that was begun before and not finished is forgotten.

        Raises:
            Refused: names, shapes or kinds of dtype differ from the model's (dtypes of one kind are cast), or the
                weights are released. Nothing has changed then.
        """
        engine, memory = self._ready()
        if "weights" in memory.asleep:
            raise Refused(
                "the rollout's weights are released, so there is nothing to load into",
                mend="resume(['weights']) before the update",
            )
        check_specs(specs, self._expected)
        self.abort_weight_update()
        self._version = None
        self._update = WeightUpdate(engine.worker, self._expected, specs, version)

    def load_bucket(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Load full tensors, on every rank the same ones; they may be reused after return.

        Raises:
            Refused: no update was begun; a tensor was not announced, came before or has another shape. Nothing of the
                bucket is loaded then.
        """
        self._under_way().load(bucket)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def finish_weight_update(self) -> None:
        """Raises Refused, with the names, when weights have not come; weight_version stays None then."""
        engine, _ = self._ready()
        update = self._under_way()
        update.finish()
        if not engine.drop_caches():
            raise ManymeshError(
                "vLLM keeps the KV cache of the old weights", mend="let no request run during an update"
            )
        self._update, self._version = None, update.version

    def abort_weight_update(self) -> None:
        """Forget the update. Weights are loaded layer by layer, so weight_version stays None if one was under way."""
        if self._update is not None:
            self._update.abort()
        self._update = None

    def _under_way(self) -> WeightUpdate:
        if self._update is None:
            raise no_update()
        return self._update

    def shutdown(self) -> None:
        """Let go of the model; the world stays. `initialize()` may load it again."""
        if self._engine is not None:
            self._engine.shutdown()
        self._engine = self._memory = self._update = self._version = None


@contextmanager
def _own_generator(seed: int, device: torch.device) -> Iterator[None]:
    """The process's generators start at `seed` inside, and go on outside as if nothing had been drawn."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
