"""Rollout with SGLang's Engine in the worker's process: weights cross in shared memory of this host or GPU."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from tensordict import TensorDict

from core.device import choose_device
from core.engine import WeightSpec
from core.errors import Refused
from core.manifest import ModelFacts
from core.mesh import RankMesh
from core.rollout import LogProbKind, MemoryTag, SamplingParams
from manymesh.parts.checkpoint_weights import read_checkpoint
from manymesh.parts.rollout_checks import check_tags, no_update, not_initialized, valid_version
from manymesh.parts.rollout_rows import Prompts, Responses
from manymesh.parts.weights import Announced, check_specs
from manymesh_sglang.config import SglangRolloutConfig
from manymesh_sglang.local_engine import LocalEngine
from manymesh_sglang.plan import plan
from manymesh_sglang.requests import Asking, may_release
from manymesh_sglang.sampling import Answer, is_certain


class SglangRollout:
    """`core.rollout.Rollout` over SGLang, whose engine this process holds.

    Versions: 0 after `initialize()`, the update's version after `finish_weight_update()`, None in between, after a
    failed update and after `release(["weights"])`, until a whole update was loaded.

    Each rank has an engine of its own; nothing here is collective.

    Args:
        config: options; `config.model` is the directory to load.
        device: "cpu", "cuda" or None for what the machine has.

    Raises:
        Refused: tensor_parallel is not 1.
    """

    def __init__(self, config: SglangRolloutConfig, device: str | None = None) -> None:
        self._config = config
        self._device = choose_device(device, int(os.environ.get("LOCAL_RANK", "0")))
        in_world = dist.is_available() and dist.is_initialized()
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if in_world else (0, 1)
        planned = plan(config, world_size, None)
        self._mesh = RankMesh(planned.layouts["dense"], rank, planned.route)
        self._engine: LocalEngine | None = None
        self._asking: Asking | None = None
        self._expected: dict[str, torch.Tensor] = {}
        self._update: tuple[Announced, int] | None = None
        self._loading = False  # SGLang's own update is open
        self._asleep: frozenset[str] = frozenset()
        self._version: int | None = None
        self._whole: int | None = None  # while an update is under way and nothing was loaded: the version that is there

    @property
    def mesh(self) -> RankMesh:
        return self._mesh

    @property
    def weight_version(self) -> int | None:
        return self._version

    def initialize(self) -> None:
        """Start the engine with the directory's weights, which are version 0.

        Raises:
            Refused: no checkpoint is there, or SGLang doesn't take it.
        """
        facts: ModelFacts
        facts, self._expected = read_checkpoint(self._config.model)
        asking = Asking.of(self._config, facts)
        self._engine = LocalEngine(self._config, facts, self._device, has_tokenizer=asking.has_tokenizer)
        self._asking = asking.within(self._engine.max_tokens)
        self._update, self._loading, self._version = None, False, 0
        self._asleep = frozenset()

    def generate(self, prompts: TensorDict, sampling: SamplingParams, *, min_version: int | None = None) -> TensorDict:
        """See `core.rollout.Rollout.generate`. Columns come back on the device of prompt_ids.

        Sample j of the prompt with prompt_id i (its row number where there is no such column) draws from
        (sampling.seed, i, j); without a seed, from fresh entropy. With temperature 0, log-probabilities RAW and
        TEMPERATURE are those of the untempered model, PROCESSED are 0, and the metadata `temperature` is 1.

        Raises:
            Refused: no valid weights, or older than min_version, or the KV cache is released; prompts that are empty,
                of another vocabulary, or that leave no room in the context or the KV cache; stop ids that the model
                doesn't have, stop strings without a tokenizer; a repetition penalty above 2, a temperature below 1e-6.
            ManymeshError: SGLang's process died, or the model gave logits that are not finite.
        """
        version = valid_version(self._version, min_version, self._state())
        engine, asking = self._ready()
        if self._asleep:
            raise Refused("the KV cache is released", mend="resume(['kv_cache']) before generating")
        table = Prompts.read(prompts)
        sample = torch.arange(sampling.num_samples).repeat(len(table))
        table = table.repeat(sampling.num_samples)
        parameters = asking.parameters(table, sampling, sample)
        rows = [row.tolist() for row in table.tokens.cpu().split(table.lengths.tolist())]
        said = engine.generate(rows, parameters) if rows else []
        answers = [Answer(f"row {row}", is_certain(sampling)) for row in range(len(rows))]
        deltas = [answer.read(each) for answer, each in zip(answers, said, strict=True)]
        responses = Responses.behind(
            table,
            [[token for delta in row for token in delta.token_ids] for row in deltas],
            [[value for delta in row for value in delta.log_probs] for row in deltas],
            [str(answer.finish_reason) for answer in answers],
        )
        return responses.batch(
            table,
            weight_version=version,
            temperature=sampling.temperature or 1.0,
            log_prob_kind=LogProbKind(sampling.log_probs).value,
        )

    def _state(self) -> str:
        if self._engine is None:
            return "not initialized"
        if "weights" in self._asleep:
            return "weights released"
        return "a weight update under way" if self._update else "weights released or an update not finished"

    def _ready(self) -> tuple[LocalEngine, Asking]:
        if self._engine is None or self._asking is None:
            raise not_initialized()
        return self._engine, self._asking

    def release(self, tags: Sequence[MemoryTag]) -> None:
        """Free memory, on CUDA with sleep_mode. Weights are dropped, so that weight_version is None until they are
        resumed and a whole update was loaded.

        Raises:
            Refused: SGLang frees nothing on this device.
        """
        engine, _ = self._ready()
        check_tags(tags)
        may_release(self._config, self._device)
        if "weights" in tags:
            self.abort_weight_update()
            self._version = None
        if wanted := sorted(set(tags) - self._asleep):
            engine.release(wanted)
            self._asleep |= set(wanted)

    def resume(self, tags: Sequence[MemoryTag]) -> None:
        """Take memory again; what is not released stays as it is. Weights hold garbage then, until a whole update."""
        engine, _ = self._ready()
        check_tags(tags)
        if waking := sorted(self._asleep & set(tags)):
            engine.resume(waking)
            self._asleep -= set(waking)

    def begin_weight_update(self, specs: Sequence[WeightSpec], version: int) -> None:
        """See `core.rollout.Rollout`. An update that was begun before and not finished is forgotten.

        Raises:
            Refused: names, shapes or kinds of dtype differ from the model's (dtypes of one kind are cast), or the
                weights are released. Nothing has changed then.
        """
        self._ready()
        if "weights" in self._asleep:
            raise Refused(
                "the rollout's weights are released, so there is nothing to load into",
                mend="resume(['weights']) before the update",
            )
        check_specs(specs, self._expected)
        self.abort_weight_update()
        self._whole, self._version = self._version, None
        self._update = Announced(specs, self._expected), version

    def load_bucket(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Load full tensors; they may be reused after return.

        Raises:
            Refused: no update was begun; a tensor was not announced, came before or has another shape. Nothing of the
                bucket is loaded then.
            ManymeshError: SGLang did not take them.
        """
        engine, _ = self._ready()
        announced, _ = self._under_way()
        announced.check(bucket)
        if not bucket:
            return
        if not self._loading:
            engine.begin_update()
            self._loading = True
        engine.load(bucket)
        announced.came(bucket)

    def finish_weight_update(self) -> None:
        """Raises Refused, with the names, when weights have not come; weight_version stays None then."""
        engine, _ = self._ready()
        announced, version = self._under_way()
        announced.check_complete()
        engine.end_update()
        self._loading = False
        engine.use_version(version)
        self._update, self._version = None, version

    def abort_weight_update(self) -> None:
        """Forget the update. Where nothing was loaded yet, the version before it is valid again; else there is none."""
        update, self._update = self._update, None
        if self._loading and self._engine is not None:
            self._loading = False
            self._engine.end_update()
        elif update is not None:
            self._version = self._whole

    def _under_way(self) -> tuple[Announced, int]:
        if self._update is None:
            raise no_update()
        return self._update

    def shutdown(self) -> None:
        """End the engine. `initialize()` may start another."""
        if self._engine is not None:
            self._engine.shutdown()
        self._engine = self._asking = self._update = self._version = None
        self._loading = False
