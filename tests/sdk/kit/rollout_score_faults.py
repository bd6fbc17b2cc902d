"""Faults of a rollout's scores."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from core.batch import flat, nested, select
from core.errors import Refused
from tests.sdk.kit.faults import caught_by
from tests.sdk.kit.rollout_faults import RolloutFault


class ScoreFault(RolloutFault):
    """Changes what is asked of score, or what comes of it."""

    def change_answer(self, out: TensorDict, sequences: TensorDict) -> TensorDict:
        return out

    def score(self, sequences: TensorDict, *, temperature: float = 1.0, top_k: int = 0) -> TensorDict:
        out: TensorDict = super().score(sequences, temperature=temperature, top_k=top_k)  # type: ignore[misc]
        return self.change_answer(out, sequences) if len(out) else out


def replaced(out: TensorDict, name: str, values: torch.Tensor) -> TensorDict:
    return out.set(name, nested(values, flat(out[name])[1]))


@caught_by("test_scores_are_the_reference_models_at_any_temperature[0.7]")
class IgnoresTemperature(ScoreFault):
    """scores at temperature 1 whatever is asked for"""

    def score(self, sequences: TensorDict, *, temperature: float = 1.0, top_k: int = 0) -> TensorDict:
        return super().score(sequences, temperature=1.0 if temperature > 0 else temperature, top_k=top_k)


@caught_by("test_scores_are_the_reference_models_at_any_temperature[1.0]")
class Shifts(ScoreFault):
    """gives scores one token too early"""

    def change_answer(self, out: TensorDict, sequences: TensorDict) -> TensorDict:
        return replaced(out, "log_probs", flat(out["log_probs"])[0].roll(-1))


@caught_by("test_scores_come_in_the_order_of_rows_and_share_their_offsets")
class SortsByLength(ScoreFault):
    """gives scores longest row first"""

    def change_answer(self, out: TensorDict, sequences: TensorDict) -> TensorDict:
        return select(out, flat(out["log_probs"])[1].diff().argsort(descending=True, stable=True))


@caught_by("test_scores_come_in_the_order_of_rows_and_share_their_offsets")
class CopiesOffsets(ScoreFault):
    """gives scores with offsets of their own"""

    def change_answer(self, out: TensorDict, sequences: TensorDict) -> TensorDict:
        for name in out.keys():  # noqa: SIM118
            values, offsets = flat(out[name])
            out.set(name, nested(values, offsets.clone()))
        return out


@caught_by("test_the_most_likely_tokens_are_the_reference_models[1.0]")
class LeastLikely(ScoreFault):
    """gives the most likely tokens least likely first"""

    def change_answer(self, out: TensorDict, sequences: TensorDict) -> TensorDict:
        for name in {"top_ids", "top_log_probs"} & set(out.keys()):
            replaced(out, name, flat(out[name])[0].flip(-1))
        return out


@caught_by("test_the_most_likely_tokens_are_the_reference_models[0.7]")
class RawTop(ScoreFault):
    """gives the most likely tokens at temperature 1"""

    def score(self, sequences: TensorDict, *, temperature: float = 1.0, top_k: int = 0) -> TensorDict:
        out = super().score(sequences, temperature=temperature, top_k=top_k)
        if top_k and len(out):
            raw = super().score(sequences, temperature=1.0, top_k=top_k)
            replaced(out, "top_log_probs", flat(raw["top_log_probs"])[0])
        return out


@caught_by("test_the_whole_vocabulary_can_be_scored")
class FewTop(ScoreFault):
    """gives no more than 20 most likely tokens"""

    def score(self, sequences: TensorDict, *, temperature: float = 1.0, top_k: int = 0) -> TensorDict:
        if 20 < top_k <= 64:
            raise Refused("too many")
        return super().score(sequences, temperature=temperature, top_k=top_k)


@caught_by("test_padded_sequences_give_what_jagged_ones_give")
class ScoresPadding(ScoreFault):
    """scores padding too"""

    def score(self, sequences: TensorDict, *, temperature: float = 1.0, top_k: int = 0) -> TensorDict:
        return super().score(sequences.exclude("attention_mask"), temperature=temperature, top_k=top_k)


@caught_by("test_what_cannot_be_scored_is_refused_and_nothing_else_is_lost[longer than the context]")
class CutsSequences(ScoreFault):
    """cuts sequences that the context doesn't hold"""

    def score(self, sequences: TensorDict, *, temperature: float = 1.0, top_k: int = 0) -> TensorDict:
        ids = sequences["input_ids"]
        if ids.is_nested and any(len(row) > 512 for row in ids.unbind()):
            sequences = TensorDict({"input_ids": torch.stack([row[:1] for row in ids.unbind()])}, [len(sequences)])
        return super().score(sequences, temperature=temperature, top_k=top_k)


@caught_by("test_what_cannot_be_scored_is_refused_and_nothing_else_is_lost[a foreign token]")
class ClampsTokens(ScoreFault):
    """scores the last token of the vocabulary in the place of foreign ones"""

    def score(self, sequences: TensorDict, *, temperature: float = 1.0, top_k: int = 0) -> TensorDict:
        ids = sequences["input_ids"]
        if ids.is_nested:
            values, offsets = flat(ids)
            sequences = sequences.copy().set("input_ids", nested(values.clamp(0, 63), offsets))
        return super().score(sequences, temperature=temperature, top_k=top_k)


@caught_by("test_scores_are_of_the_weights_that_came_last_and_refused_without_any")
class KeepsScores(ScoreFault):
    """gives the scores that it gave for these sequences before"""

    def score(self, sequences: TensorDict, *, temperature: float = 1.0, top_k: int = 0) -> TensorDict:
        cache = self.__dict__.setdefault("_scores", {})
        ids = sequences["input_ids"]
        key = (str(ids.tolist() if not ids.is_nested else [row.tolist() for row in ids.unbind()]), temperature, top_k)
        if key not in cache or self.weight_version is None:
            cache[key] = super().score(sequences, temperature=temperature, top_k=top_k)
        out: TensorDict = cache[key]
        return out


@caught_by("test_scores_are_of_the_weights_that_came_last_and_refused_without_any")
class ScoresHalfAnUpdate(ScoreFault):
    """scores while there are no valid weights"""

    def score(self, sequences: TensorDict, *, temperature: float = 1.0, top_k: int = 0) -> TensorDict:
        try:
            return super().score(sequences, temperature=temperature, top_k=top_k)
        except Refused:
            if self.weight_version is not None:
                raise
            values, offsets = flat(sequences["input_ids"])
            return TensorDict({}, [len(sequences)]).set("log_probs", nested(values * 0.0, offsets))


@caught_by("test_scores_with_model_inputs_that_it_does_not_read_are_refused_by_name")
class DropsModelInputs(ScoreFault):
    """scores without the model inputs that it doesn't read"""

    def score(self, sequences: TensorDict, *, temperature: float = 1.0, top_k: int = 0) -> TensorDict:
        return super().score(sequences.select("input_ids"), temperature=temperature, top_k=top_k)
