"""Rollout with vLLM inside the worker's process: the engine shares its world, its memory and its weights' names."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import attrs
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.device_mesh import init_device_mesh

from core.engine import WeightSpec
from core.errors import ManymeshError, Refused
from core.manifest import ModelFacts
from core.mesh import RankMesh
from core.rollout import MemoryTag, SamplingParams
from manymesh.parts.agreement import on_every_rank
from manymesh.parts.base_rollout import BaseReleasingRollout, Bucket
from manymesh.parts.checkpoint_weights import read_checkpoint
from manymesh.parts.rollout_checks import check_sleep_mode, not_initialized
from manymesh.parts.rollout_rows import answer, read_prompts, repeat_samples, token_lists
from manymesh.parts.row_seeds import row_keys
from manymesh.parts.scoring import RowScore, parts, read_sequences, scores
from manymesh.parts.world_mesh import world_mesh, world_size
from manymesh_vllm import sampling as vllm_sampling
from manymesh_vllm.config import VllmRolloutConfig
from manymesh_vllm.local_engine import LocalEngine, score_limits
from manymesh_vllm.memory import sleep_steps
from manymesh_vllm.plan import TP, plan
from manymesh_vllm.weights import Reload


class VllmRollout(BaseReleasingRollout):
    """`core.rollout.ScoringRollout` over vLLM, in this process. Releases memory on CUDA with sleep_mode.

    Where the world has several ranks, construction, `initialize`, `generate` and weight updates are collective over the
    ranks of one dp rank (`infer_tp`), and the first two over all.

    Args:
        config: options; `config.model` is the directory to load.
        device: "cpu", "cuda" or None for what the machine has.

    Raises:
        Refused: tensor_parallel doesn't fit the world.
    """

    _config: VllmRolloutConfig

    def __init__(self, config: VllmRolloutConfig, device: str | None = None) -> None:
        super().__init__(config, device, world_mesh(plan(config, world_size(), None)))
        self._mesh = attrs.evolve(self._mesh, groups=self._groups(self._mesh))
        self._engine: LocalEngine | None = None
        self._reload: Reload | None = None

    def _groups(self, mesh: RankMesh) -> Any:
        if mesh.groups is None:
            return None
        device_mesh = init_device_mesh(self._device.type, mesh.layout.sizes, mesh_dim_names=("dp", TP))

        def group(*axes: str) -> Any:
            if set(axes) == {"dp", TP}:
                return dist.group.WORLD
            if axes not in (("dp",), (TP,)):
                raise Refused("the mesh has no such axes", have=axes, want=("dp", TP))
            return device_mesh.get_group(*axes)

        return group

    def _build(self) -> Mapping[str, torch.Tensor]:
        """Collective over the world. Raises Refused too where tensor_parallel doesn't cut the model."""
        is_alone = self._mesh.groups is None
        facts, expected = self._look() if is_alone else on_every_rank(self._mesh.group("dp", TP), self._look)
        self._engine = LocalEngine(self._config, facts, self._device)
        self._reload = None
        return expected

    def _look(self) -> tuple[ModelFacts, dict[str, torch.Tensor]]:
        """What the directory holds, and that it can be cut."""
        facts, expected = read_checkpoint(self._config.model, self._config.load)
        plan(self._config, self._mesh.layout.world_size, facts)
        return facts, expected

    def generate(self, prompts: TensorDict, sampling: SamplingParams, *, min_version: int | None = None) -> TensorDict:
        """See BaseRollout.generate.

        Collective over the ranks of one dp rank, which give the same rows.

        Raises:
            Refused: no valid weights, or older than min_version, or the KV cache is released; prompts that are empty,
                of another vocabulary, or that leave no room in the context; stop ids that the model doesn't have, stop
                strings without a tokenizer; raw log-probabilities at a temperature below 0.01.
            ManymeshError: the model gave logits that are not finite.
        """
        version = self._ready().check_can_sample(min_version)
        engine = self._running()
        prompt_batch = read_prompts(prompts)
        model_config = engine.llm.llm_engine.model_config
        vllm_sampling.check(sampling)
        ends = engine.check.stop_ids(prompt_batch, sampling, model_config.get_vocab_size(), model_config.max_model_len)
        prompt_rows, sample = repeat_samples(prompt_batch, sampling.num_samples)
        seeds, randomness = self._randomness(sampling, prompt_rows["prompt_id"].cpu(), sample)
        rows = vllm_sampling.requests(sampling, ends, len(prompt_rows), seeds)
        texts = [{"prompt_token_ids": row} for row in token_lists(prompt_rows["prompt_ids"])]
        with vllm_sampling.log_probs_of(engine.worker.model_runner, sampling), randomness:
            outputs = engine.llm.generate(texts, rows, use_tqdm=False) if texts else []
        tokens, log_probs, reasons = vllm_sampling.answers(
            outputs, sampling, f"weight version {version}, rank {self._mesh.rank}"
        )
        return answer(prompt_rows, tokens, log_probs, reasons, sampling=sampling, weight_version=version)

    def score(self, sequences: TensorDict, *, temperature: float = 1.0, top_k: int = 0) -> TensorDict:
        """See `core.rollout.ScoringRollout.score`. The longest sequence is one token short of vLLM's context, and its
        logits are in memory as a whole: (tokens, vocabulary) fp32.

        Collective over the ranks of one dp rank, which give the same rows.

        Raises:
            Refused: the KV cache is released.
            ManymeshError: the model gave logits that are not finite.
        """
        version, engine = self._ready().check_can_sample(), self._running()
        vocab_size, longest = score_limits(engine.llm.llm_engine.model_config)
        ids = read_sequences(sequences, vocab_size=vocab_size, longest=longest, temperature=temperature, top_k=top_k)
        values: list[RowScore] = []
        with vllm_sampling.logits_divided(engine.worker.model_runner, temperature):
            for part in parts(token_lists(ids), top_k):
                texts = [{"prompt_token_ids": row} for row in part]
                outputs = engine.llm.generate(texts, vllm_sampling.score_request(top_k), use_tqdm=False)
                values += [vllm_sampling.row_score(each, top_k) for each in outputs]
        return scores(ids, values, top_k, f"weight version {version}, rank {self._mesh.rank}")

    def _randomness(
        self, sampling: SamplingParams, prompt_id: torch.Tensor, sample: torch.Tensor
    ) -> tuple[list[int] | None, AbstractContextManager[Any]]:
        """Seeds by row, and a generator for the rest: vLLM draws from the process's in either case, as trainers do.

        Rows have seeds where the sampling has none: vLLM would draw them from numpy's generator, which it starts alike
        on all ranks and after each restart.
        """
        if not sampling.temperature:
            return None, nullcontext()
        fresh = [int.from_bytes(os.urandom(8))]
        randomness = _own_generator(fresh[0], self._device)
        seed = sampling.seed
        if seed is None:
            if self._mesh.layout.size(TP) > 1:
                dist.broadcast_object_list(fresh, group=self._mesh.group(TP), group_src=0)
            [seed] = fresh
        keys = row_keys(seed, prompt_id, sample)
        return (keys >> 1).tolist(), randomness  # vLLM wants them in an int64

    def _running(self) -> LocalEngine:
        if self._engine is None:
            raise not_initialized()
        return self._engine

    # -------------------------------------------------------------------------------------- weights and memory

    def _begin_load(self, specs: Sequence[WeightSpec], version: int) -> None:
        self._reload = Reload(self._running().worker)

    def _load(self, bucket: Bucket) -> None:
        assert self._reload is not None
        self._reload.load(bucket)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _end_load(self, version: int) -> None:
        assert self._reload is not None
        self._reload.finish()
        if not self._running().drop_caches():
            raise ManymeshError(
                "vLLM keeps the KV cache of the old weights", mend="let no request run during an update"
            )
        self._reload = None

    def _abort_load(self) -> None:
        reload, self._reload = self._reload, None
        if reload is not None:
            reload.abort()

    def _check_can_release(self) -> None:
        check_sleep_mode("vLLM", self._device.type, sleep_mode=self._config.sleep_mode)

    def _release_memory(self, tags: Sequence[MemoryTag], released_tags: frozenset[MemoryTag]) -> None:
        llm = self._running().llm
        for step in sleep_steps(tags, released_tags):
            llm.wake_up(list(step.tags)) if step.level is None else llm.sleep(level=step.level)

    def _resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        self._running().llm.wake_up(list(tags))

    def _close(self) -> None:
        """The world stays."""
        engine, self._engine, self._reload = self._engine, None, None
        if engine is not None:
            engine.shutdown()


@contextmanager
def _own_generator(seed: int, device: torch.device) -> Iterator[None]:
    """The process's generators start at `seed` inside, and go on outside as if nothing had been drawn."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
