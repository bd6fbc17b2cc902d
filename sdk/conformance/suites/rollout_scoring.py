"""Scores of a rollout: log-probabilities and most likely tokens of given texts, against transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from core.batch import flat
from core.errors import Refused
from core.manifest import Capability
from core.rollout import Rollout, ScoringRollout
from sdk.conformance.base import absent, offered
from sdk.conformance.suites.rollout_base import (
    CONTEXT,
    Models,
    RolloutSuite,
    following,
    prompts,
    rows_of,
    sequences,
    specs,
    update,
)

TEXTS = ([5], Models.long(40), [9, 9, 7], [1, 5, 6, 9, 30], Models.long(200)[::-1], [60, 61])
TOP_K = 5
WRONG: dict[str, tuple[list[list[int]], dict[str, Any], str]] = {
    "a foreign token": ([[5, 6], [7, 64]], {}, "sequence 1"),
    "temperature 0": ([[5, 6]], {"temperature": 0.0}, "temperature"),
    "a negative top-k": ([[5, 6]], {"top_k": -1}, "top_k"),
    "more than the vocabulary": ([[5, 6]], {"top_k": 65}, "top_k"),
    "longer than the context": ([[5], Models.long(CONTEXT + 1)], {}, "sequence 1"),
}


def as_scoring(rollout: Rollout) -> ScoringRollout:
    assert isinstance(rollout, ScoringRollout)
    return rollout


class ScoreSuite(RolloutSuite):
    def reference_scores(self, number: int, row: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
        """Of every token but the first, by the model itself: (tokens - 1, vocabulary)."""
        logits = following(self.models.reference(number), row)[:-1]
        return (logits / temperature).log_softmax(-1)

    def score_error(self, rollout: Rollout, number: int, rows: Sequence[Sequence[int]], **options: Any) -> float:
        """Of the rollout's log-probs from the model's, the largest distance; infinite where rows are not aligned."""
        out = as_scoring(rollout).score(sequences(*rows), **options)
        worst = 0.0
        for row, values in zip(rows, out["log_probs"].unbind(), strict=True):
            if len(values) != len(row) or float(values[0]) != 0:
                return float("inf")
            if len(row) > 1:
                table = self.reference_scores(number, row, options.get("temperature", 1.0))
                want = table.gather(1, torch.tensor(list(row[1:]))[:, None])[:, 0]
                worst = max(worst, float((values[1:] - want).abs().max()))
        return worst

    @offered(Capability.SCORE)
    @pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
    def test_scores_are_the_reference_models_at_any_temperature(self, rollout: Rollout, temperature: float) -> None:
        assert self.score_error(rollout, 1, TEXTS, temperature=temperature) < self.bounds.sampled

    @offered(Capability.SCORE)
    def test_scores_come_in_the_order_of_rows_and_share_their_offsets(self, rollout: Rollout) -> None:
        for order in ([5, 1, 0, 4, 2, 3], [4, 3, 2, 1, 0, 5]):
            assert self.score_error(rollout, 1, [TEXTS[i] for i in order]) < self.bounds.sampled
        batch = sequences(*TEXTS)
        out = as_scoring(rollout).score(batch, top_k=2)
        assert {name: out[name].dtype for name in ("log_probs", "top_ids", "top_log_probs")} == {
            "log_probs": torch.float32,
            "top_ids": torch.int64,
            "top_log_probs": torch.float32,
        }
        assert out["top_ids"].values().shape == (sum(map(len, TEXTS)), 2)
        # Arithmetic between token columns works only where they share their offsets.
        assert all(flat(out[name])[1] is flat(batch["input_ids"])[1] for name in out.keys())  # noqa: SIM118
        assert set(as_scoring(rollout).score(batch).keys()) == {"log_probs"}

    @offered(Capability.SCORE)
    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_the_most_likely_tokens_are_the_reference_models(self, rollout: Rollout, temperature: float) -> None:
        out = as_scoring(rollout).score(sequences(*TEXTS), temperature=temperature, top_k=TOP_K)
        columns = (out[name].unbind() for name in ("log_probs", "top_ids", "top_log_probs"))
        for row, log_probs, ids, values in zip(TEXTS, *columns, strict=True):
            assert ids.shape == values.shape == (len(row), TOP_K)
            assert not ids[0].any()
            assert not values[0].any()
            if len(row) == 1:
                continue
            table = self.reference_scores(1, row, temperature)
            assert float((table.topk(TOP_K).values - values[1:]).abs().max()) < self.bounds.sampled
            assert float((table.gather(1, ids[1:]) - values[1:]).abs().max()) < self.bounds.sampled
            for token, log_prob, best, likely in zip(row[1:], log_probs[1:], ids[1:], values[1:], strict=True):
                assert len(set(best.tolist())) == TOP_K
                if (best == token).any():
                    assert float((likely[best == token] - log_prob).abs().max()) < 1e-5
                else:
                    assert float(log_prob) <= float(likely.min()) + 1e-5

    @offered(Capability.SCORE)
    def test_the_whole_vocabulary_can_be_scored(self, rollout: Rollout) -> None:
        out = as_scoring(rollout).score(sequences(TEXTS[3]), top_k=64)
        want = self.reference_scores(1, TEXTS[3])
        have = torch.empty_like(want).scatter(1, out["top_ids"].values()[1:], out["top_log_probs"].values()[1:])
        assert float((have - want).abs().max()) < self.bounds.sampled

    @offered(Capability.SCORE)
    def test_what_it_sampled_it_scores_alike(self, rollout: Rollout) -> None:
        sampling = self.sampling(num_samples=2, max_new_tokens=12, temperature=0.8, **self.seed(3))
        batch = rollout.generate(prompts([5, 6], [7]), sampling)
        at = 1.0 if self.log_prob_kind.value == "raw" else 0.8
        scores = as_scoring(rollout).score(batch, temperature=at)
        for row, values in zip(rows_of(batch), scores["log_probs"].unbind(), strict=True):
            assert float((values[torch.tensor(row.mask)] - row.log_probs).abs().max()) < self.bounds.sampled

    @offered(Capability.SCORE)
    def test_padded_sequences_give_what_jagged_ones_give(self, rollout: Rollout) -> None:
        ids, mask = torch.zeros(2, 4, dtype=torch.int64), torch.tensor([[True] * 4, [True, True, False, False]])
        ids[0], ids[1, :2] = torch.tensor([5, 6, 7, 8]), torch.tensor([9, 10])
        padded = TensorDict({"input_ids": ids, "attention_mask": mask}, batch_size=[2])
        have = as_scoring(rollout).score(padded)["log_probs"]
        want = as_scoring(rollout).score(sequences([5, 6, 7, 8], [9, 10]))["log_probs"]
        assert torch.equal(have.offsets(), want.offsets())
        assert float((have.values() - want.values()).abs().max()) < 1e-5

    @offered(Capability.SCORE)
    def test_no_sequences_give_no_rows_with_all_columns(self, rollout: Rollout) -> None:
        empty = TensorDict({"input_ids": torch.zeros(0, 4, dtype=torch.int64)}, batch_size=[0])
        out = as_scoring(rollout).score(empty, top_k=2)
        assert set(out.keys()) == {"log_probs", "top_ids", "top_log_probs"}
        assert len(out) == 0

    @offered(Capability.SCORE)
    @pytest.mark.parametrize("wrong", WRONG)
    def test_what_cannot_be_scored_is_refused_and_nothing_else_is_lost(self, rollout: Rollout, wrong: str) -> None:
        rows, options, message = WRONG[wrong]
        with pytest.raises(Refused, match=message):
            as_scoring(rollout).score(sequences(*rows), **options)
        assert self.score_error(rollout, 1, TEXTS[:2]) < self.bounds.sampled

    @offered(Capability.SCORE)
    def test_scores_with_model_inputs_that_it_does_not_read_are_refused_by_name(self, rollout: Rollout) -> None:
        with pytest.raises(Refused, match="inputs/strange_pixels"):
            as_scoring(rollout).score(sequences([5, 6]).set("inputs/strange_pixels", torch.zeros(1, 3)))

    @offered(Capability.SCORE)
    def test_scores_are_of_the_weights_that_came_last_and_refused_without_any(self, live: Rollout) -> None:
        rows = [Models.long(300), [5, 6, 7], Models.long(300)]
        assert self.score_error(live, 1, rows) < self.bounds.sampled  # long enough to be kept in a cache
        weights = self.models.weights(2)
        live.begin_weight_update(specs(weights), 1)
        with pytest.raises(Refused, match="no valid weights"):
            as_scoring(live).score(sequences([5, 6]))
        live.abort_weight_update()
        update(live, weights, 2)
        assert self.score_error(live, 2, rows) < self.bounds.sampled
        assert self.score_error(live, 1, rows) > 1e-1

    @absent(Capability.SCORE)
    def test_a_rollout_that_does_not_score_has_no_score(self, rollout: Rollout) -> None:
        assert not isinstance(rollout, ScoringRollout)
