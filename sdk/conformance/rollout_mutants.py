"""Faults that are put into a sound rollout, each of which the suite must find. They know the protocol, not the rollout.

A fault overrides methods of the rollout's class, so that what it doesn't touch is as it was.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import torch
from safetensors.torch import load_file
from tensordict import TensorDict

from core.batch import jagged, object_column, objects, select, with_metadata
from core.errors import Refused
from core.manifest import Capability
from core.protocols import LogProbKind, SamplingParams, WeightSpec
from core.registry import Entry
from sdk.conformance.base import Mutant
from sdk.conformance.suites.rollout_base import Weights, prompts, specs

MUTANTS: list[Mutant] = []

Bucket = Sequence[tuple[str, torch.Tensor]]
FaultClass = TypeVar("FaultClass", bound=type["Fault"])


class Fault:
    """Base of the faults, put before the rollout's class; `super()` is the rollout."""

    _config: Any

    @classmethod
    def put_into(cls, rollout: Any) -> Any:
        rollout.__class__ = type(cls.__name__, (cls, type(rollout)), {})
        return rollout

    def own_weights(self) -> Weights:
        return dict(load_file(Path(self._config.model, "model.safetensors")))

    if TYPE_CHECKING:  # what the rollout has
        weight_version: Any

        def __getattr__(self, name: str) -> Any: ...


def caught_by(*tests: str) -> Callable[[FaultClass], FaultClass]:
    """Name the tests that must find a fault; its docstring says what it does wrong."""

    def register(cls: FaultClass) -> FaultClass:
        doc = " ".join((cls.__doc__ or "").split()).rstrip(".")
        MUTANTS.append(Mutant(doc, tests, built=f"{cls.__module__}:{cls.__name__}.put_into"))
        return cls

    return register


class GenerateFault(Fault):
    """Changes what is asked of generate, or what comes of it."""

    def asked(self, sampling: SamplingParams) -> SamplingParams:
        return sampling

    def given(self, out: TensorDict, sampling: SamplingParams) -> TensorDict:
        return out

    def generate(self, batch: TensorDict, sampling: SamplingParams, *, min_version: int | None = None) -> TensorDict:
        out: TensorDict = super().generate(batch, self.asked(sampling), min_version=min_version)  # type: ignore[misc]
        with_metadata(out, temperature=sampling.temperature or 1.0, log_prob_kind=LogProbKind(sampling.log_probs).value)
        return self.given(out, sampling) if len(out) else out


# ------------------------------------------------------------------------------------------------------------ rows


@caught_by("test_rows_come_in_the_order_of_their_prompts_whichever_ends_first")
class PermutesRows(GenerateFault):
    """gives rows in the order in which they ended"""

    def given(self, out: TensorDict, sampling: SamplingParams) -> TensorDict:
        return select(out, out["input_ids"].offsets().diff().argsort(stable=True))


@caught_by("test_rows_are_prompt_major_and_token_columns_are_aligned")
class SampleMajor(GenerateFault):
    """gives samples sample-major"""

    def given(self, out: TensorDict, sampling: SamplingParams) -> TensorDict:
        return select(out, torch.arange(len(out)).view(-1, sampling.num_samples).T.flatten())


@caught_by("test_greedy_rows_are_the_reference_models", "test_log_probs_are_of_the_kind_that_is_asked_for[raw]")
class ShiftsLogProbs(GenerateFault):
    """gives log-probs one token too early"""

    def given(self, out: TensorDict, sampling: SamplingParams) -> TensorDict:
        return out.set("rollout_log_probs", jagged([row.roll(-1) for row in out["rollout_log_probs"].unbind()]))


@caught_by("test_rows_are_prompt_major_and_token_columns_are_aligned")
class MarksPrompts(GenerateFault):
    """counts prompts as sampled"""

    def given(self, out: TensorDict, sampling: SamplingParams) -> TensorDict:
        mask = out["response_mask"]
        return out.set("response_mask", torch.nested.nested_tensor_from_jagged(mask.values() | True, mask.offsets()))


@caught_by("test_filler_prompts_give_filler_rows")
class CountsFiller(GenerateFault):
    """gives filler rows a weight"""

    def given(self, out: TensorDict, sampling: SamplingParams) -> TensorDict:
        return out.set("row_weight", torch.ones(len(out)))


@caught_by("test_the_eos_ends_a_row_and_belongs_to_the_response")
class LosesTruncation(GenerateFault):
    """says of truncated rows that they stopped"""

    def given(self, out: TensorDict, sampling: SamplingParams) -> TensorDict:
        return out.set("finish_reason", object_column(["stop" for _ in objects(out.get("finish_reason"))]))


@caught_by("test_the_eos_ends_a_row_and_belongs_to_the_response")
class DropsStops(GenerateFault):
    """leaves the token out that ended a row"""

    def given(self, out: TensorDict, sampling: SamplingParams) -> TensorDict:
        reasons = objects(out.get("finish_reason"))
        for name in ("input_ids", "response_mask", "rollout_log_probs"):
            rows = zip(out[name].unbind(), reasons, strict=True)
            out.set(name, jagged([row[:-1] if reason == "stop" else row for row, reason in rows]))
        return out


@caught_by("test_a_prompt_may_fill_the_context_and_a_longer_one_is_refused_with_the_limit")
class CutsPrompts(GenerateFault):
    """cuts prompts that leave no room"""

    def generate(self, batch: TensorDict, sampling: SamplingParams, *, min_version: int | None = None) -> TensorDict:
        try:
            return super().generate(batch, sampling, min_version=min_version)
        except Refused:
            ids = batch.get("prompt_ids", None)
            if ids is None or not ids.is_nested:
                raise
            cut = [row[-64:].tolist() for row in ids.unbind()]
            return super().generate(prompts(*cut), sampling, min_version=min_version)


@caught_by("test_padded_prompts_give_what_jagged_ones_give[left]")
class ReadsPadding(GenerateFault):
    """takes padding for tokens of the prompt"""

    def generate(self, batch: TensorDict, sampling: SamplingParams, *, min_version: int | None = None) -> TensorDict:
        return super().generate(batch.exclude("attention_mask"), sampling, min_version=min_version)


@caught_by("test_metadata_say_temperature_and_kind_of_log_probs")
class SaysNothing(GenerateFault):
    """leaves the metadata out"""

    def given(self, out: TensorDict, sampling: SamplingParams) -> TensorDict:
        return out.exclude("temperature", "log_prob_kind")


@caught_by("test_no_prompts_give_an_empty_batch_with_all_columns")
class EmptyForNone(GenerateFault):
    """gives no columns for no prompts"""

    def generate(self, batch: TensorDict, sampling: SamplingParams, *, min_version: int | None = None) -> TensorDict:
        out = super().generate(batch, sampling, min_version=min_version)
        return out if len(out) else TensorDict({}, batch_size=[0])


@caught_by("test_ignore_eos_samples_the_same_and_goes_on", "test_the_eos_ends_a_row_and_belongs_to_the_response")
class InvertsEos(GenerateFault):
    """ignores the EOS where it counts, and only there"""

    def asked(self, sampling: SamplingParams) -> SamplingParams:
        return attrs.evolve(sampling, ignore_eos=not sampling.ignore_eos)


@caught_by("test_each_row_ends_at_its_first_stop_token_or_whole_stop_string")
class IgnoresStrings(GenerateFault):
    """ignores stop strings"""

    def asked(self, sampling: SamplingParams) -> SamplingParams:
        return attrs.evolve(sampling, stop=())


@caught_by("test_a_stop_token_ends_a_row_and_belongs_to_the_response", "test_stops_that_cannot_be_are_refused")
class IgnoresStopTokens(GenerateFault):
    """ignores stop tokens"""

    def asked(self, sampling: SamplingParams) -> SamplingParams:
        return attrs.evolve(sampling, stop_token_ids=())


@caught_by("test_prompts_that_cannot_be_are_refused[foreign token]")
class ClampsTokens(GenerateFault):
    """takes the last token of the vocabulary for foreign ones"""

    def generate(self, batch: TensorDict, sampling: SamplingParams, *, min_version: int | None = None) -> TensorDict:
        ids = batch.get("prompt_ids", None)
        if ids is not None and ids.is_nested:
            legal = torch.nested.nested_tensor_from_jagged(ids.values().clamp(0, 63), ids.offsets())
            batch = batch.copy().set("prompt_ids", legal)
        return super().generate(batch, sampling, min_version=min_version)


# -------------------------------------------------------------------------------------------------------- sampling


@caught_by(
    "test_log_probs_are_of_the_kind_that_is_asked_for[temperature]",
    "test_samples_follow_the_distribution_and_never_leave_its_support[temperature]",
)
class IgnoresTemperature(GenerateFault):
    """ignores the temperature"""

    def asked(self, sampling: SamplingParams) -> SamplingParams:
        return attrs.evolve(sampling, temperature=1.0 if sampling.temperature else 0.0)


@caught_by(
    "test_samples_follow_the_distribution_and_never_leave_its_support[top-k]",
    "test_samples_follow_the_distribution_and_never_leave_its_support[top-p]",
    "test_samples_follow_the_distribution_and_never_leave_its_support[min-p]",
    "test_the_narrowest_truncation_leaves_the_greedy_token[top-k]",
)
class IgnoresTruncation(GenerateFault):
    """ignores top-k, top-p and min-p"""

    def asked(self, sampling: SamplingParams) -> SamplingParams:
        return attrs.evolve(sampling, top_k=0, top_p=1.0, min_p=0.0)


@caught_by("test_repetition_penalty_counts_a_rows_own_tokens_only")
class IgnoresPenalty(GenerateFault):
    """ignores the repetition penalty"""

    def asked(self, sampling: SamplingParams) -> SamplingParams:
        return attrs.evolve(sampling, repetition_penalty=1.0)


@caught_by("test_log_probs_are_of_the_kind_that_is_asked_for[temperature]")
class IgnoresKind(GenerateFault):
    """gives raw log-probs whatever is asked for"""

    def asked(self, sampling: SamplingParams) -> SamplingParams:
        return attrs.evolve(sampling, log_probs=LogProbKind.RAW)


@caught_by("test_a_rows_samples_depend_neither_on_its_batch_nor_on_its_place")
class IgnoresSeed(GenerateFault):
    """ignores the seed"""

    def asked(self, sampling: SamplingParams) -> SamplingParams:
        return attrs.evolve(sampling, seed=None)


@caught_by("test_samples_differ_by_prompt_id_by_sample_and_by_seed", "test_unseeded_rows_differ_and_so_do_calls")
class FixedSeed(GenerateFault):
    """draws from one seed whatever is asked for"""

    def asked(self, sampling: SamplingParams) -> SamplingParams:
        return attrs.evolve(sampling, seed=0)


@caught_by("test_a_rows_samples_depend_neither_on_its_batch_nor_on_its_place")
class SeedsByPlace(GenerateFault):
    """draws by a row's place in the batch instead of its prompt_id"""

    def generate(self, batch: TensorDict, sampling: SamplingParams, *, min_version: int | None = None) -> TensorDict:
        named = batch.get("prompt_id", None)
        out = super().generate(batch.exclude("prompt_id"), sampling, min_version=min_version)
        return out if named is None else out.set("prompt_id", named.repeat_interleave(sampling.num_samples))


@caught_by("test_neither_rollout_nor_trainer_draws_from_the_others_generator")
class DrawsFromTrainer(GenerateFault):
    """draws from the process's generator"""

    def asked(self, sampling: SamplingParams) -> SamplingParams:
        torch.rand(1)
        return sampling


@caught_by("test_min_new_tokens_holds_every_stop_back")
class IgnoresMinimum(GenerateFault):
    """ignores min_new_tokens"""

    def asked(self, sampling: SamplingParams) -> SamplingParams:
        return attrs.evolve(sampling, min_new_tokens=0)


@caught_by("test_one_call_may_ask_for_another_kind_than_the_one_before")
class KeepsKind(GenerateFault):
    """gives log-probs of the kind that was asked for first"""

    def asked(self, sampling: SamplingParams) -> SamplingParams:
        self._first = self.__dict__.get("_first", sampling.log_probs)
        return attrs.evolve(sampling, log_probs=self._first)


@caught_by("test_rows_without_prompt_id_count_from_zero")
class CountsFromOne(GenerateFault):
    """counts prompts without prompt_id from one"""

    def generate(self, batch: TensorDict, sampling: SamplingParams, *, min_version: int | None = None) -> TensorDict:
        if "prompt_id" not in batch and len(batch):
            batch = batch.copy().set("prompt_id", torch.arange(1, len(batch) + 1))
        return super().generate(batch, sampling, min_version=min_version)


@caught_by("test_ranks_generate_what_one_does_before_and_after_an_update")
class SeedsByRank(GenerateFault):
    """draws from other seeds on other ranks"""

    def asked(self, sampling: SamplingParams) -> SamplingParams:
        return sampling if sampling.seed is None else attrs.evolve(sampling, seed=sampling.seed + self.mesh.rank)


# --------------------------------------------------------------------------------------------------------- weights


@caught_by("test_what_the_old_weights_left_in_a_cache_is_not_used_after_an_update")
class KeepsCache(GenerateFault):
    """keeps the KV cache of prompts over an update"""

    def initialize(self) -> None:
        super().initialize()  # type: ignore[misc]
        model, kept = self._model, {}
        generate = model.generate

        def cached(ids: torch.Tensor, **options: Any) -> Any:
            if len(ids) > 1 or ids.shape[1] < 100:
                return generate(ids, **options)
            key = tuple(ids[0].tolist())
            if key not in kept:
                with torch.no_grad():
                    kept[key] = model(ids[:, :-1], use_cache=True).past_key_values
            return generate(ids, past_key_values=copy.deepcopy(kept[key]), **options)

        model.generate = cached


@caught_by(
    "test_it_is_the_reference_model_before_and_after_each_of_three_updates[untied]",
    "test_rows_say_which_weights_sampled_them_and_older_ones_may_be_refused",
)
class KeepsVersion(GenerateFault):
    """loads weights and keeps the old version"""

    @property
    def weight_version(self) -> int | None:
        return None if super().weight_version is None else 0

    def given(self, out: TensorDict, sampling: SamplingParams) -> TensorDict:
        return out.set("weight_version", torch.zeros_like(out["weight_version"]))


@caught_by("test_rows_say_which_weights_sampled_them_and_older_ones_may_be_refused")
class IgnoresMinVersion(GenerateFault):
    """samples with weights that are too old"""

    def generate(self, batch: TensorDict, sampling: SamplingParams, *, min_version: int | None = None) -> TensorDict:
        return super().generate(batch, sampling)


@caught_by("test_it_is_the_reference_model_before_and_after_each_of_three_updates[untied]")
class SwapsKeysAndValues(Fault):
    """loads keys as values"""

    def load_bucket(self, bucket: Bucket) -> None:
        swap = {"k_proj": "v_proj", "v_proj": "k_proj"}
        named = []
        for name, tensor in bucket:
            part = next((part for part in swap if part in name), None)
            named.append((name.replace(part, swap[part]) if part else name, tensor))
        super().load_bucket(named)  # type: ignore[misc]


@caught_by("test_weights_of_another_model_are_refused_and_the_old_ones_stay[an unknown name]")
class AcceptsUnknown(Fault):
    """passes over names that the model doesn't know"""

    def begin_weight_update(self, announced: Sequence[WeightSpec], version: int) -> None:
        known = self.own_weights()
        super().begin_weight_update([spec for spec in announced if spec.name in known], version)  # type: ignore[misc]


@caught_by(
    "test_weights_of_another_model_are_refused_and_the_old_ones_stay[a missing name]",
    "test_an_incomplete_update_is_not_finished_and_generates_nothing",
)
class AcceptsMissing(Fault):
    """leaves weights that don't come as they were in the checkpoint"""

    def begin_weight_update(self, announced: Sequence[WeightSpec], version: int) -> None:
        names, own = {spec.name for spec in announced}, self.own_weights()
        rest = [spec for spec in specs(own) if spec.name not in names]
        super().begin_weight_update([*announced, *rest], version)  # type: ignore[misc]
        self._came: set[str] = set()

    def load_bucket(self, bucket: Bucket) -> None:
        super().load_bucket(bucket)  # type: ignore[misc]
        self._came |= {name for name, _ in bucket}

    def finish_weight_update(self) -> None:
        left = [(name, tensor) for name, tensor in self.own_weights().items() if name not in self._came]
        super().load_bucket(left)  # type: ignore[misc]
        super().finish_weight_update()  # type: ignore[misc]


@caught_by("test_weights_of_another_model_are_refused_and_the_old_ones_stay[another shape]")
class ChecksLate(Fault):
    """refuses weights of another model when the update has begun"""

    def begin_weight_update(self, announced: Sequence[WeightSpec], version: int) -> None:
        try:
            super().begin_weight_update(announced, version)  # type: ignore[misc]
        except Refused:
            if self.weight_version is not None:
                super().begin_weight_update(specs(self.own_weights()), version)  # type: ignore[misc]
            raise


@caught_by("test_after_an_aborted_update_nothing_is_sampled_with_weights_that_are_not_whole[1]")
class TrustsAborted(Fault):
    """takes the weights for whole after an update was aborted"""

    def begin_weight_update(self, announced: Sequence[WeightSpec], version: int) -> None:
        before = self.weight_version
        super().begin_weight_update(announced, version)  # type: ignore[misc]
        self._before, self._left = before, {spec.name for spec in announced}

    def load_bucket(self, bucket: Bucket) -> None:
        super().load_bucket(bucket)  # type: ignore[misc]
        self._left -= {name for name, _ in bucket}

    def abort_weight_update(self) -> None:
        super().load_bucket([(n, t) for n, t in self.own_weights().items() if n in self._left])  # type: ignore[misc]
        super().finish_weight_update()  # type: ignore[misc]


@caught_by("test_tensors_may_be_reused_after_load_bucket")
class HoldsTensors(Fault):
    """reads the sender's tensors when the update is finished"""

    def begin_weight_update(self, announced: Sequence[WeightSpec], version: int) -> None:
        super().begin_weight_update(announced, version)  # type: ignore[misc]
        self._held: list[tuple[str, torch.Tensor]] = []

    def load_bucket(self, bucket: Bucket) -> None:
        self._held += bucket

    def finish_weight_update(self) -> None:
        super().load_bucket(self._held)  # type: ignore[misc]
        super().finish_weight_update()  # type: ignore[misc]


@caught_by("test_a_bad_bucket_is_refused_as_a_whole")
class LoadsInPart(Fault):
    """loads what comes before a bad tensor in its bucket"""

    def load_bucket(self, bucket: Bucket) -> None:
        for pair in bucket:
            super().load_bucket([pair])  # type: ignore[misc]


@caught_by("test_a_name_announced_twice_is_refused")
class AcceptsDoubled(Fault):
    """takes a name that is announced twice for one"""

    def begin_weight_update(self, announced: Sequence[WeightSpec], version: int) -> None:
        once = list({spec.name: spec for spec in announced}.values())
        super().begin_weight_update(once, version)  # type: ignore[misc]


@caught_by("test_an_update_that_nobody_finished_is_forgotten_by_the_next")
class GoesOn(Fault):
    """goes on with an update that nobody finished when the next one begins"""

    def begin_weight_update(self, announced: Sequence[WeightSpec], version: int) -> None:
        if self.weight_version is not None:
            super().begin_weight_update(announced, version)  # type: ignore[misc]


@caught_by("test_weights_of_another_precision_are_cast")
class RefusesHalves(Fault):
    """refuses weights of another precision"""

    def begin_weight_update(self, announced: Sequence[WeightSpec], version: int) -> None:
        if any(spec.dtype == "bfloat16" for spec in announced):
            raise Refused("these weights have another precision")
        super().begin_weight_update(announced, version)  # type: ignore[misc]


@caught_by("test_logits_that_are_not_finite_are_an_error")
class HidesNan(Fault):
    """loads zeros for what is not a number"""

    def load_bucket(self, bucket: Bucket) -> None:
        super().load_bucket([(name, tensor.nan_to_num()) for name, tensor in bucket])  # type: ignore[misc]


@caught_by("test_released_weights_wait_for_resume_and_a_whole_update")
class GeneratesAfterRelease(Fault):
    """generates after its weights were released"""

    def release(self, tags: Sequence[str]) -> None:
        super().release([])  # type: ignore[misc]


@caught_by("test_a_released_kv_cache_leaves_the_weights_valid")
class ReleasesAll(Fault):
    """releases the weights with the KV cache"""

    def release(self, tags: Sequence[str]) -> None:
        super().release([*tags, "weights"])  # type: ignore[misc]


@caught_by("test_resume_of_what_is_not_released_changes_nothing")
class ResumesAnyway(Fault):
    """takes new memory for weights that have theirs"""

    def resume(self, tags: Sequence[str]) -> None:
        super().release(["weights"])  # type: ignore[misc]
        super().resume(tags)  # type: ignore[misc]


@caught_by("test_unknown_tags_are_refused")
class AcceptsTags(Fault):
    """passes over tags that it doesn't know"""

    def release(self, tags: Sequence[str]) -> None:
        super().release([tag for tag in tags if tag in ("weights", "kv_cache")])  # type: ignore[misc]


# ------------------------------------------------------------------------------------------------------------ life


@caught_by("test_nothing_works_before_initialize")
class InitializesItself(GenerateFault):
    """loads its model when it is first asked"""

    def generate(self, batch: TensorDict, sampling: SamplingParams, *, min_version: int | None = None) -> TensorDict:
        if self._model is None:
            self.initialize()
        return super().generate(batch, sampling, min_version=min_version)


@caught_by("test_its_mesh_is_valid_before_initialize")
class LateMesh(Fault):
    """has no mesh before initialize"""

    @property
    def mesh(self) -> Any:
        if self._model is None:
            raise Refused("no mesh yet")
        return super().mesh  # type: ignore[misc]


@caught_by("test_a_directory_without_a_whole_model_is_refused[a weight is missing]")
class FillsIn(Fault):
    """leaves weights to chance that the checkpoint lacks"""

    def initialize(self) -> None:
        try:
            super().initialize()  # type: ignore[misc]
        except Refused as error:
            if "lm_head" not in str(error):
                raise


@caught_by("test_it_takes_no_requests")
class TakesRequests(Fault):
    """takes requests that its manifest doesn't offer"""

    def submit(self, prompt_ids: Sequence[int], sampling: SamplingParams, **options: Any) -> Any:
        return iter(())


@caught_by("test_after_shutdown_nothing_works_and_no_process_is_left")
class LeavesProcess(Fault):
    """leaves a process behind"""

    def initialize(self) -> None:
        super().initialize()  # type: ignore[misc]
        self._child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])


def without_row_seeds(entry: Entry) -> Entry:
    assert entry.manifest is not None
    hidden = entry.manifest.capabilities - {Capability.ROW_SEEDS}
    return attrs.evolve(entry, manifest=attrs.evolve(entry.manifest, capabilities=hidden))


MUTANTS.append(
    Mutant("takes a seed that its manifest doesn't offer", ("test_a_seed_is_refused",), entry=without_row_seeds)
)
