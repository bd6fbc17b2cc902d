"""Which tokens a rollout draws, with what log-probability, from which stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from core.errors import Refused
from core.manifest import Capability
from core.rollout import LogProbKind, Rollout, SamplingParams
from sdk.conformance.base import absent, gate, offered
from sdk.conformance.suites.rollout_base import (
    RolloutSuite,
    capability_of,
    following,
    next_logits,
    prompts,
    responses,
    rows_of,
)

RAGGED = ([1, 5, 6, 9, 30], [7], [40, 41, 42])
PROMPTS = [[1, 5, 6], [7], [40, 41, 42, 43], [9, 9], [1, 5, 6], [12, 13, 14, 15, 16, 17]]
SEEDED = {"num_samples": 3, "max_new_tokens": 10, "seed": 42}

KINDS: dict[str, dict[str, Any]] = {
    "raw": {"temperature": 0.7, "log_probs": LogProbKind.RAW},
    "temperature": {"temperature": 0.7, "log_probs": LogProbKind.TEMPERATURE},
    "temperature 1": {"log_probs": LogProbKind.TEMPERATURE},
    "raw, truncated": {"temperature": 0.7, "top_k": 9, "log_probs": LogProbKind.RAW},
    "temperature, truncated": {"temperature": 0.7, "top_k": 9, "log_probs": LogProbKind.TEMPERATURE},
    "processed by top-k and top-p": {"temperature": 1.3, "top_k": 20, "top_p": 0.8, "log_probs": LogProbKind.PROCESSED},
    "processed by min-p": {"temperature": 1.3, "min_p": 0.1, "log_probs": LogProbKind.PROCESSED},
    "greedy": {"temperature": 0.0, "log_probs": LogProbKind.TEMPERATURE},
}
DISTRIBUTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top-k": {"temperature": 1.5, "top_k": 6},
    "top-p": {"temperature": 1.5, "top_p": 0.6},
    "min-p": {"temperature": 1.5, "min_p": 0.2},
}
NARROWEST: dict[str, dict[str, Any]] = {
    "top-k": {"top_k": 1},
    "top-p": {"top_p": 1e-6},
    "min-p": {"min_p": 0.999},
    "temperature": {"temperature": 0.01},
}


def processed(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Log-probabilities after temperature and truncation, (..., vocab); written from the definitions."""
    logits = logits / (sampling.temperature or 1.0)
    if sampling.top_k:
        logits = logits.where(logits >= logits.topk(sampling.top_k).values[..., -1:], -torch.inf)
    if sampling.top_p < 1:
        probs, order = logits.softmax(-1).sort(descending=True, dim=-1)
        keep = probs.cumsum(-1) - probs < sampling.top_p  # the smallest set that reaches top_p
        logits = logits.where(torch.empty_like(keep).scatter(-1, order, keep), -torch.inf)
    if sampling.min_p:
        probs = logits.softmax(-1)
        logits = logits.where(probs >= sampling.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return logits.log_softmax(-1)


def log_probs_of(model: Any, prompt: Sequence[int], tokens: Sequence[int], sampling: SamplingParams) -> torch.Tensor:
    """Of sampled tokens, of the kind that was asked for, by the model itself."""
    logits = following(model, [*prompt, *tokens])[len(prompt) - 1 : -1]
    if sampling.log_probs is LogProbKind.PROCESSED:
        table = processed(logits, sampling)
    else:
        tempered = sampling.log_probs is LogProbKind.TEMPERATURE
        table = (logits / ((sampling.temperature or 1.0) if tempered else 1.0)).log_softmax(-1)
    return table.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def chi_square_excess(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Pearson's statistic above its mean, in standard deviations. Rare tokens share one bin."""
    num = counts.sum()
    common = probs * num >= 5
    want = torch.cat([probs[common], probs[~common].sum()[None]]) * num
    have = torch.cat([counts[common], counts[~common].sum()[None]])
    want, have = want[want > 0], have[want > 0]
    freedom = len(want) - 1  # the mean; the variance is twice that
    assert freedom >= 3
    return float((((have - want) ** 2 / want).sum() - freedom) / (2 * freedom) ** 0.5)


class SamplingSuite(RolloutSuite):
    @pytest.mark.parametrize("options", KINDS.values(), ids=KINDS.keys())
    def test_log_probs_are_of_the_kind_that_is_asked_for(self, rollout: Rollout, options: dict[str, Any]) -> None:
        kind = options["log_probs"]
        sampling = SamplingParams(num_samples=8, max_new_tokens=8, **self.seed(5), **options)
        if not self.offers(capability_of(kind)):
            with pytest.raises(Refused, match=kind.value):
                rollout.generate(prompts(*RAGGED), sampling)
            return
        for row in rows_of(rollout.generate(prompts(*RAGGED), sampling)):
            want = log_probs_of(self.models.reference(1), row.prompt, row.tokens, sampling)
            assert (row.log_probs - want).abs().max() < self.bounds.sampled

    def test_a_greedy_tokens_processed_log_prob_is_zero(self, rollout: Rollout) -> None:
        sampling = SamplingParams(temperature=0.0, max_new_tokens=4, log_probs=LogProbKind.PROCESSED)
        if not self.offers(Capability.LOG_PROBS_PROCESSED):
            with pytest.raises(Refused):
                rollout.generate(prompts([5]), sampling)
            return
        assert not rollout.generate(prompts([5]), sampling)["rollout_log_probs"].values().any()

    def test_one_call_may_ask_for_another_kind_than_the_one_before(self, rollout: Rollout) -> None:
        options: dict[str, Any] = {"temperature": 0.5, "top_k": 5, "max_new_tokens": 6, "ignore_eos": True}

        def sampled(kind: LogProbKind) -> list[float]:
            out = rollout.generate(prompts([5, 6]), SamplingParams(log_probs=kind, **self.seed(3), **options))
            values: list[float] = out["rollout_log_probs"].values().tolist()
            return values

        first = {kind: sampled(kind) for kind in self.kinds()}
        assert len({tuple(values) for values in first.values()}) == len(self.kinds())
        if self.offers(Capability.ROW_SEEDS):
            assert {kind: sampled(kind) for kind in self.kinds()} == first

    @pytest.mark.parametrize("options", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS.keys())
    def test_samples_follow_the_distribution_and_never_leave_its_support(
        self, rollout: Rollout, options: dict[str, Any]
    ) -> None:
        prompt, num = [5, 6], 1000
        sampling = self.sampling(num_samples=num, max_new_tokens=1, **self.seed(11), **options)
        tokens = torch.tensor(responses(rollout.generate(prompts(prompt), sampling)))[:, 0]
        counts = torch.bincount(tokens, minlength=64).double()
        probs = processed(next_logits(self.models.reference(1), prompt), sampling).exp().double()
        assert not counts[probs == 0].any()
        assert chi_square_excess(counts, probs) < 4

    @pytest.mark.parametrize("options", NARROWEST.values(), ids=NARROWEST.keys())
    def test_the_narrowest_truncation_leaves_the_greedy_token(self, rollout: Rollout, options: dict[str, Any]) -> None:
        greedy = responses(rollout.generate(prompts(*RAGGED), self.greedy(8)))
        sampling = self.sampling(num_samples=2, max_new_tokens=8, **self.seed(0), **options)
        assert responses(rollout.generate(prompts(*RAGGED), sampling)) == [row for row in greedy for _ in range(2)]

    def test_repetition_penalty_counts_a_rows_own_tokens_only(self, rollout: Rollout) -> None:
        penalty, rows = 1.8, ([30, 31, 32, 33, 34, 35], [7, 8])
        out = rollout.generate(prompts(*rows), self.greedy(12, repetition_penalty=penalty, ignore_eos=True))
        free = rollout.generate(prompts(*rows), self.greedy(12, ignore_eos=True))
        assert responses(out) != responses(free)
        for row in rows_of(out):
            for i in range(len(row.prompt), len(row.ids)):
                logits, token_ids = (
                    next_logits(self.models.reference(1), row.ids[:i]),
                    torch.tensor(row.ids[:i]).unique(),
                )
                logits[token_ids] = torch.where(
                    logits[token_ids] < 0, logits[token_ids] * penalty, logits[token_ids] / penalty
                )
                assert int(logits.argmax()) == row.ids[i]

    def test_unseeded_rows_differ_and_so_do_calls(self, rollout: Rollout) -> None:
        def sample() -> list[list[int]]:
            return responses(
                rollout.generate(prompts([5]), self.sampling(num_samples=4, max_new_tokens=24, ignore_eos=True))
            )

        first = sample()
        assert len({tuple(row) for row in first}) == 4
        assert sample() != first

    def test_neither_rollout_nor_trainer_draws_from_the_others_generator(self, rollout: Rollout) -> None:
        def sample() -> list[list[int]]:
            torch.manual_seed(5)
            return responses(rollout.generate(prompts([5, 6]), self.sampling(num_samples=4, max_new_tokens=10)))

        assert sample() != sample()
        torch.manual_seed(5)
        alone = torch.rand(3)
        for seed in ({}, self.seed(1)):
            torch.manual_seed(5)
            rollout.generate(prompts([5, 6]), self.sampling(max_new_tokens=4, **seed))
            assert torch.equal(torch.rand(3), alone)

    # ---------------------------------------------------------------------------------------------------- seeds

    def _seeded(self, rollout: Rollout, order: list[int], **options: Any) -> list[list[int]]:
        """Responses for these of PROMPTS, whose prompt_id is their number there."""
        batch = prompts(*(PROMPTS[i] for i in order), prompt_id=order)
        return responses(rollout.generate(batch, self.sampling(**(SEEDED | options))))

    @gate(lambda suite: "" if suite.dtype == "float32" else "sums of that precision depend on the batch")
    @offered(Capability.ROW_SEEDS)
    def test_a_rows_samples_depend_neither_on_its_batch_nor_on_its_place(self, rollout: Rollout) -> None:
        whole = self._seeded(rollout, [0, 1, 2, 3, 4, 5])
        assert [row for part in ([0], [1, 2, 3, 4], [5]) for row in self._seeded(rollout, part)] == whole
        order = [3, 0, 5, 2, 4, 1]
        assert self._seeded(rollout, order) == [whole[3 * i + j] for i in order for j in range(3)]
        first = self._seeded(rollout, [2, 4], num_samples=1)
        assert first == [whole[6], whole[12]]

    @offered(Capability.ROW_SEEDS)
    def test_rows_without_prompt_id_count_from_zero(self, rollout: Rollout) -> None:
        out = rollout.generate(prompts(*PROMPTS), self.sampling(**SEEDED))
        assert responses(out) == self._seeded(rollout, [0, 1, 2, 3, 4, 5])

    @offered(Capability.ROW_SEEDS)
    def test_samples_differ_by_prompt_id_by_sample_and_by_seed(self, rollout: Rollout) -> None:
        same_prompt = self._seeded(rollout, [0, 4])
        assert len({tuple(row) for row in same_prompt}) == 6
        others = [self._seeded(rollout, [0, 4], seed=seed) for seed in (43, -1, 2**64 - 2)]
        assert len({str(rows) for rows in (same_prompt, *others)}) == 4

    @absent(Capability.ROW_SEEDS)
    def test_a_seed_is_refused(self, rollout: Rollout) -> None:
        with pytest.raises(Refused, match="seed"):
            rollout.generate(prompts([5]), self.sampling(max_new_tokens=2, seed=1))
