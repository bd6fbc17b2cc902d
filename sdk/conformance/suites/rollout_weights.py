"""Weights of a rollout: updates by what is then sampled, and refusals that change nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM

from core.engine import WeightSpec
from core.errors import ManymeshError, Refused
from core.rollout import Rollout
from sdk.conformance.suites.rollout_base import (
    Models,
    RolloutHolder,
    RolloutSuite,
    Weights,
    buckets,
    greedy_error,
    prompts,
    rows_of,
    specs,
    update,
)

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "untied": ("qwen3", {}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "odd vocabulary": ("qwen3", {"vocab_size": 70}),  # engines pad it
    "biases": ("qwen2", {}),  # beside weights that engines fuse
    "llama": ("llama", {}),
    "experts": ("qwen3_moe", {}),
}
NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"


def renamed(weights: Weights) -> Weights:
    return {("model.strange" if name == NORM else name): tensor for name, tensor in weights.items()}


def incomplete(weights: Weights) -> Weights:
    return {name: tensor for name, tensor in weights.items() if name != NORM}


SPOILED: dict[str, tuple[Callable[[Weights], Weights], tuple[str, ...]]] = {
    "a missing name": (incomplete, ("24 matched", NORM)),
    "an unknown name": (lambda weights: weights | {"model.strange": torch.ones(64)}, ("25 matched", "model.strange")),
    "another name": (renamed, ("24 matched", NORM, "model.strange")),
    "another shape": (lambda weights: weights | {NORM: torch.ones(65)}, (NORM, "(65,)", "(64,)")),
    "another kind of dtype": (lambda weights: weights | {NORM: torch.ones(64, dtype=torch.int64)}, (NORM, "int64")),
}


class WeightSuite(RolloutSuite):
    """How a rollout is told from a reference model."""

    def error(self, rollout: Rollout, reference: Any) -> float:
        """Of the rollout's greedy rows from the reference's, the largest. Its prompts are long enough to be cached."""
        out = rollout.generate(prompts([5, 6, 7], [9], Models.long(200)), self.greedy(12, ignore_eos=True))
        return max(greedy_error(reference, row, self.log_prob_kind) for row in rows_of(out))

    def is_model(self, rollout: Rollout, number: int) -> bool:
        return self.error(rollout, self.models.reference(number)) < self.bounds.sampled


class UpdateSuite(WeightSuite):
    """
    Attributes:
        families: of FAMILIES, those that updates are tested with; each takes an engine of its own, but for the first.
    """

    families: ClassVar[Sequence[str]] = ("untied", "tied")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "family" in metafunc.fixturenames:
            metafunc.parametrize("family", self.families)

    def test_it_is_the_reference_model_before_and_after_each_of_three_updates(
        self, holder: RolloutHolder, fresh: Callable[[str], Rollout], family: str
    ) -> None:
        name, options = FAMILIES[family]
        if family == "untied":
            rollout = holder.get()
            holder.changed = True
        else:
            holder.close()  # what engines of one process share may be sharded otherwise for this family
            rollout = fresh(self.models.directory(1, name, **options))
        assert self.error(rollout, self.models.reference(1, name, **options)) < self.bounds.sampled
        for version, (number, size) in enumerate([(2, 3), (3, 1), (1, 100)], start=1):
            reference = self.models.reference(number, name, **options)
            assert self.error(rollout, reference) > 1e-1
            update(rollout, self.models.weights(number, name, **options), version, size)
            assert rollout.weight_version == version
            assert self.error(rollout, reference) < self.bounds.sampled
        if family == "tied":
            weights = self.models.weights(1, name, **options)
            assert "lm_head.weight" not in weights
            with pytest.raises(Refused, match=r"lm_head\.weight"):
                rollout.begin_weight_update([*specs(weights), WeightSpec("lm_head.weight", (64, 64), "float32")], 4)
            assert rollout.weight_version == 3

    def test_what_the_old_weights_left_in_a_cache_is_not_used_after_an_update(self, live: Rollout) -> None:
        batch = prompts(Models.long(400))
        live.generate(batch, self.greedy(1))
        live.generate(batch, self.greedy(1))
        update(live, self.models.weights(2), 1)
        [row] = rows_of(live.generate(batch, self.greedy(8, ignore_eos=True)))
        assert greedy_error(self.models.reference(2), row, self.log_prob_kind) < self.bounds.sampled

    def test_rows_say_which_weights_sampled_them_and_older_ones_may_be_refused(self, live: Rollout) -> None:
        update(live, self.models.weights(2), 4)
        out = live.generate(prompts([5], [6]), self.greedy(2), min_version=4)
        assert out["weight_version"].tolist() == [4, 4]
        with pytest.raises(Refused, match=r"4[\s\S]*5"):
            live.generate(prompts([5]), self.greedy(2), min_version=5)
        assert live.weight_version == 4

    @pytest.mark.parametrize(("spoil", "says"), SPOILED.values(), ids=SPOILED.keys())
    def test_weights_of_another_model_are_refused_and_the_old_ones_stay(
        self, live: Rollout, spoil: Callable[[Weights], Weights], says: tuple[str, ...]
    ) -> None:
        with pytest.raises(Refused) as raised:
            live.begin_weight_update(specs(spoil(self.models.weights(2))), 1)
        assert [text for text in says if text not in str(raised.value)] == []
        assert live.weight_version == 0
        assert self.is_model(live, 1)

    def test_a_name_announced_twice_is_refused(self, live: Rollout) -> None:
        twice = specs(self.models.weights(2))
        with pytest.raises(Refused):
            live.begin_weight_update([*twice, twice[0]], 1)
        assert live.weight_version == 0

    def test_an_incomplete_update_is_not_finished_and_generates_nothing(self, live: Rollout) -> None:
        weights = self.models.weights(2)
        live.begin_weight_update(specs(weights), 1)
        assert live.weight_version is None
        last, *rest = buckets(weights)
        for bucket in rest:
            live.load_bucket(bucket)
        with pytest.raises(Refused) as raised:
            live.finish_weight_update()
        assert [name for name, _ in last if name not in str(raised.value)] == []
        assert live.weight_version is None
        with pytest.raises(Refused):
            live.generate(prompts([5]), self.greedy(2))
        live.load_bucket(last)
        live.finish_weight_update()
        assert self.is_model(live, 2)

    @pytest.mark.parametrize("num_buckets", [1, 12, 25])
    def test_after_an_aborted_update_nothing_is_sampled_with_weights_that_are_not_whole(
        self, live: Rollout, num_buckets: int
    ) -> None:
        weights = self.models.weights(2)
        live.begin_weight_update(specs(weights), 1)
        for _, bucket in zip(range(num_buckets), buckets(weights, 1), strict=False):
            live.load_bucket(bucket)
        live.abort_weight_update()
        for call in (lambda: live.load_bucket(next(buckets(weights))), live.finish_weight_update):
            with pytest.raises(Refused):
                call()
        if live.weight_version is None:
            with pytest.raises(Refused):
                live.generate(prompts([5]), self.greedy(2))
        else:  # what was loaded is kept apart from the old weights
            assert live.weight_version == 0
            assert self.is_model(live, 1)
        update(live, weights, 2)
        assert live.weight_version == 2
        assert self.is_model(live, 2)

    def test_an_update_that_nobody_finished_is_forgotten_by_the_next(self, live: Rollout) -> None:
        weights = self.models.weights(3)
        live.begin_weight_update(specs(weights), 1)
        live.load_bucket(next(buckets(weights, 5)))
        update(live, self.models.weights(2), 2)
        assert live.weight_version == 2
        assert self.is_model(live, 2)

    def test_a_bad_bucket_is_refused_as_a_whole(self, live: Rollout) -> None:
        weights = self.models.weights(2)
        live.begin_weight_update(specs(weights), 1)
        good = (EMBEDDING, weights[EMBEDDING])
        for bad in (("model.strange", torch.ones(1)), (NORM, torch.ones(63)), good):
            with pytest.raises(Refused):
                live.load_bucket([good, bad])
        live.load_bucket([(NORM, weights[NORM])])
        with pytest.raises(Refused, match=NORM):
            live.load_bucket([(NORM, weights[NORM])])
        for bucket in buckets(incomplete(weights)):
            live.load_bucket(bucket)
        live.finish_weight_update()
        assert self.is_model(live, 2)

    def test_tensors_may_be_reused_after_load_bucket(self, live: Rollout) -> None:
        weights = self.models.weights(2)
        live.begin_weight_update(specs(weights), 1)
        for bucket in buckets(weights, 2):
            live.load_bucket(bucket)
            for _, tensor in bucket:
                tensor.fill_(torch.nan)
        live.finish_weight_update()
        assert self.is_model(live, 2)

    def test_weights_of_another_precision_are_cast(self, live: Rollout) -> None:
        halves = {name: tensor.bfloat16() for name, tensor in self.models.weights(2).items()}
        update(live, halves, 1)
        reference = AutoModelForCausalLM.from_pretrained(self.models.directory(2), dtype=torch.bfloat16).float().eval()
        assert self.error(live, reference) < self.bounds.sampled

    def test_logits_that_are_not_finite_are_an_error(self, live: Rollout) -> None:
        update(live, self.models.weights(2) | {NORM: torch.full((64,), torch.nan)}, 1)
        with pytest.raises(ManymeshError):
            live.generate(prompts([5]), self.sampling(max_new_tokens=2))
