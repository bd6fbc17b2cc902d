"""Faults of what a rollout samples, and of the rows that it gives."""

from __future__ import annotations

import attrs
import torch
from tensordict import TensorDict

from core.batch import jagged, object_column, objects, select
from core.columns import model_inputs
from core.errors import Refused
from core.rollout import LogProbKind, SamplingParams
from sdk.conformance.suites.rollout_base import prompts
from tests.sdk.kit.faults import caught_by
from tests.sdk.kit.rollout_faults import GenerateFault


@caught_by("test_rows_come_in_the_order_of_their_prompts_whichever_ends_first")
class PermutesRows(GenerateFault):
    """gives rows in the order in which they ended"""

    def change_answer(self, out: TensorDict, sampling: SamplingParams) -> TensorDict:
        return select(out, out["input_ids"].offsets().diff().argsort(stable=True))


@caught_by("test_rows_are_prompt_major_and_token_columns_are_aligned")
class SampleMajor(GenerateFault):
    """gives samples sample-major"""

    def change_answer(self, out: TensorDict, sampling: SamplingParams) -> TensorDict:
        return select(out, torch.arange(len(out)).view(-1, sampling.num_samples).T.flatten())


@caught_by("test_greedy_rows_are_the_reference_models", "test_log_probs_are_of_the_kind_that_is_asked_for[raw]")
class ShiftsLogProbs(GenerateFault):
    """gives log-probs one token too early"""

    def change_answer(self, out: TensorDict, sampling: SamplingParams) -> TensorDict:
        return out.set("rollout_log_probs", jagged([row.roll(-1) for row in out["rollout_log_probs"].unbind()]))


@caught_by("test_rows_are_prompt_major_and_token_columns_are_aligned")
class MarksPrompts(GenerateFault):
    """counts prompts as sampled"""

    def change_answer(self, out: TensorDict, sampling: SamplingParams) -> TensorDict:
        mask = out["response_mask"]
        return out.set("response_mask", torch.nested.nested_tensor_from_jagged(mask.values() | True, mask.offsets()))


@caught_by("test_filler_prompts_give_filler_rows")
class CountsFiller(GenerateFault):
    """gives filler rows a weight"""

    def change_answer(self, out: TensorDict, sampling: SamplingParams) -> TensorDict:
        return out.set("row_weight", torch.ones(len(out)))


@caught_by("test_the_eos_ends_a_row_and_belongs_to_the_response")
class LosesTruncation(GenerateFault):
    """says of truncated rows that they stopped"""

    def change_answer(self, out: TensorDict, sampling: SamplingParams) -> TensorDict:
        return out.set("finish_reason", object_column(["stop" for _ in objects(out.get("finish_reason"))]))


@caught_by("test_the_eos_ends_a_row_and_belongs_to_the_response")
class DropsStops(GenerateFault):
    """leaves the token out that ended a row"""

    def change_answer(self, out: TensorDict, sampling: SamplingParams) -> TensorDict:
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
            rows_of_ids = [row[-64:].tolist() for row in ids.unbind()]
            return super().generate(prompts(*rows_of_ids), sampling, min_version=min_version)


@caught_by("test_padded_prompts_give_what_jagged_ones_give[left]")
class ReadsPadding(GenerateFault):
    """takes padding for tokens of the prompt"""

    def generate(self, batch: TensorDict, sampling: SamplingParams, *, min_version: int | None = None) -> TensorDict:
        return super().generate(batch.exclude("attention_mask"), sampling, min_version=min_version)


@caught_by("test_model_inputs_that_it_does_not_read_are_refused_by_name")
class DropsModelInputs(GenerateFault):
    """leaves model inputs out that it doesn't read"""

    def generate(self, batch: TensorDict, sampling: SamplingParams, *, min_version: int | None = None) -> TensorDict:
        return super().generate(batch.exclude(*model_inputs(batch.keys())), sampling, min_version=min_version)


@caught_by("test_metadata_say_temperature_and_kind_of_log_probs")
class SaysNothing(GenerateFault):
    """leaves the metadata out"""

    def change_answer(self, out: TensorDict, sampling: SamplingParams) -> TensorDict:
        return out.exclude("rollout_temperature", "log_prob_kind")


@caught_by("test_no_prompts_give_an_empty_batch_with_all_columns")
class EmptyForNone(GenerateFault):
    """gives no columns for no prompts"""

    def generate(self, batch: TensorDict, sampling: SamplingParams, *, min_version: int | None = None) -> TensorDict:
        out = super().generate(batch, sampling, min_version=min_version)
        return out if len(out) else TensorDict({}, batch_size=[0])


@caught_by("test_ignore_eos_samples_the_same_and_goes_on", "test_the_eos_ends_a_row_and_belongs_to_the_response")
class InvertsEos(GenerateFault):
    """ignores the EOS where it counts, and only there"""

    def change_request(self, sampling: SamplingParams) -> SamplingParams:
        return attrs.evolve(sampling, ignore_eos=not sampling.ignore_eos)


@caught_by("test_each_row_ends_at_its_first_stop_token_or_whole_stop_string")
class IgnoresStrings(GenerateFault):
    """ignores stop strings"""

    def change_request(self, sampling: SamplingParams) -> SamplingParams:
        return attrs.evolve(sampling, stop=())


@caught_by("test_a_stop_token_ends_a_row_and_belongs_to_the_response", "test_stops_that_cannot_be_are_refused")
class IgnoresStopTokens(GenerateFault):
    """ignores stop tokens"""

    def change_request(self, sampling: SamplingParams) -> SamplingParams:
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

    def change_request(self, sampling: SamplingParams) -> SamplingParams:
        return attrs.evolve(sampling, temperature=1.0 if sampling.temperature else 0.0)


@caught_by(
    "test_samples_follow_the_distribution_and_never_leave_its_support[top-k]",
    "test_samples_follow_the_distribution_and_never_leave_its_support[top-p]",
    "test_samples_follow_the_distribution_and_never_leave_its_support[min-p]",
    "test_the_narrowest_truncation_leaves_the_greedy_token[top-k]",
)
class IgnoresTruncation(GenerateFault):
    """ignores top-k, top-p and min-p"""

    def change_request(self, sampling: SamplingParams) -> SamplingParams:
        return attrs.evolve(sampling, top_k=0, top_p=1.0, min_p=0.0)


@caught_by("test_repetition_penalty_counts_a_rows_own_tokens_only")
class IgnoresPenalty(GenerateFault):
    """ignores the repetition penalty"""

    def change_request(self, sampling: SamplingParams) -> SamplingParams:
        return attrs.evolve(sampling, repetition_penalty=1.0)


@caught_by("test_log_probs_are_of_the_kind_that_is_asked_for[temperature]")
class IgnoresKind(GenerateFault):
    """gives raw log-probs whatever is asked for"""

    def change_request(self, sampling: SamplingParams) -> SamplingParams:
        return attrs.evolve(sampling, log_probs=LogProbKind.RAW)


@caught_by("test_a_rows_samples_depend_neither_on_its_batch_nor_on_its_place")
class IgnoresSeed(GenerateFault):
    """ignores the seed"""

    def change_request(self, sampling: SamplingParams) -> SamplingParams:
        return attrs.evolve(sampling, seed=None)


@caught_by("test_samples_differ_by_prompt_id_by_sample_and_by_seed", "test_unseeded_rows_differ_and_so_do_calls")
class FixedSeed(GenerateFault):
    """draws from one seed whatever is asked for"""

    def change_request(self, sampling: SamplingParams) -> SamplingParams:
        return attrs.evolve(sampling, seed=0)


@caught_by("test_a_rows_samples_depend_neither_on_its_batch_nor_on_its_place")
class SeedsByPlace(GenerateFault):
    """draws by a row's place in the batch instead of its prompt_id"""

    def generate(self, batch: TensorDict, sampling: SamplingParams, *, min_version: int | None = None) -> TensorDict:
        prompt_id = batch.get("prompt_id", None)
        out = super().generate(batch.exclude("prompt_id"), sampling, min_version=min_version)
        return out if prompt_id is None else out.set("prompt_id", prompt_id.repeat_interleave(sampling.num_samples))


@caught_by("test_neither_rollout_nor_trainer_draws_from_the_others_generator")
class DrawsFromTrainer(GenerateFault):
    """draws from the process's generator"""

    def change_request(self, sampling: SamplingParams) -> SamplingParams:
        torch.rand(1)
        return sampling


@caught_by("test_min_new_tokens_holds_every_stop_back")
class IgnoresMinimum(GenerateFault):
    """ignores min_new_tokens"""

    def change_request(self, sampling: SamplingParams) -> SamplingParams:
        return attrs.evolve(sampling, min_new_tokens=0)


@caught_by("test_one_call_may_ask_for_another_kind_than_the_one_before")
class KeepsKind(GenerateFault):
    """gives log-probs of the kind that was asked for first"""

    def change_request(self, sampling: SamplingParams) -> SamplingParams:
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

    def change_request(self, sampling: SamplingParams) -> SamplingParams:
        return sampling if sampling.seed is None else attrs.evolve(sampling, seed=sampling.seed + self.mesh.rank)
