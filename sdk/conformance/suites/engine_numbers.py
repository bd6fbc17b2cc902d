"""Outputs, losses, gradients and steps are those of one process with a plain transformers model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from core.batch import select
from core.config import OptimizerConfig
from core.errors import Refused
from core.loss import LossFn
from core.manifest import Capability
from sdk.conformance.base import Subject, absent, offered
from sdk.conformance.closeness import assert_close, assert_moved_alike
from sdk.conformance.suites.engine_base import (
    BATCHES,
    FULL,
    PLAIN_STEP,
    EngineSuite,
    Tensors,
    Trained,
    answer_to,
    engine_of,
    infer,
    micro_batches,
    step,
    weights,
)
from sdk.reference import TEMPERATURE, DistillationLoss, PlainTrainer, make_batch, scale_of, with_teacher

PACKED: dict[str, Any] = {"packing": True}


def infer_parts(
    rank: int,
    world_size: int,
    subject: Subject,
    model: str,
    batch: TensorDict,
    outputs: frozenset[str],
    loss: LossFn,
    **options: Any,
) -> tuple[int, list[tuple[Tensors, bool, dict[str, float]]]] | None:
    """By micro-batch, of three: outputs, whether any requires a gradient, metrics; and this rank's dp rank."""
    with engine_of(subject, model, trainable=False, **options) as engine:
        batches = micro_batches(engine, batch, 3)
        with engine.eval_mode():
            run = partial(engine.forward_backward, batches, temperature=TEMPERATURE, forward_only=True)
            results = run(loss, scale_of(batch), outputs=outputs)
            names = frozenset(sorted(outputs)[:1])
            some = run(None, scale_of(batch), outputs=names)
            none = run(loss, scale_of(batch))
        if results is None:
            return None
        assert all(each.outputs.keys() == names for each in some), "outputs are those that were asked for"
        assert all(each.outputs is None for each in none), "no outputs where none were asked for"
        parts = [
            (
                dict(each.outputs.items()),
                any(value.requires_grad for value in each.outputs.values()),
                {name: metric.total for name, metric in each.metrics.items()},
            )
            for each in results
        ]
        return engine.mesh.dp_rank, parts


def infer_each(
    rank: int,
    world_size: int,
    subject: Subject,
    model: str,
    batches: list[TensorDict],
    outputs: frozenset[str],
    temperatures: Sequence[float] = (TEMPERATURE,),
    **options: Any,
) -> list[Tensors | None]:
    """Outputs of each batch at each temperature."""
    with engine_of(subject, model, trainable=False, **options) as engine:
        return [infer(engine, batch, outputs, temperature=each) for batch in batches for each in temperatures]


def step_once(
    rank: int, world_size: int, subject: Subject, model: str, batch: TensorDict, loss: LossFn, **options: Any
) -> tuple[float, float, Tensors]:
    with engine_of(subject, model, **options) as engine:
        total, norm, *_ = step(engine, batch, loss)
        return total, norm, weights(engine)


def distil(
    rank: int, world_size: int, subject: Subject, model: str, batch: TensorDict, bare: TensorDict, loss: LossFn
) -> tuple[Tensors | None, float, Tensors, str]:
    with engine_of(subject, model) as engine:
        answer = answer_to(lambda: infer(engine, bare, loss.needs))
        outputs = infer(engine, batch, loss.needs)
        _, norm, *_ = step(engine, batch, loss, 2)
        return outputs, norm, weights(engine), answer


class NumbersSuite(EngineSuite):
    def test_outputs_are_aligned_with_tokens_and_zero_elsewhere(self, world_size: int) -> None:
        self.check_outputs(self.trained(world_size))

    def test_the_loss_is_the_sum_of_shares(self, world_size: int) -> None:
        self.check_losses(self.trained(world_size))

    def test_the_gradient_is_the_sum_of_shares_over_dp_ranks(self, world_size: int) -> None:
        self.check_gradient(self.trained(world_size))

    @pytest.mark.parametrize("num_micro", [2, 4])
    def test_the_gradient_is_the_sum_of_shares_over_micro_batches(self, world_size: int, num_micro: int) -> None:
        ranks = self.trained(world_size, num_micro=num_micro)
        self.check_losses(ranks)
        self.check_gradient(ranks)

    def test_clipped_and_scheduled_steps_are_those_of_one_process(self, world_size: int) -> None:
        ranks, plain = self.trained(world_size, FULL, num_micro=2), self.plain(FULL)
        for rank in ranks:
            assert rank.norms == pytest.approx(plain.norms, rel=self.bounds.relative), (
                "grad_norm is that before clipping"
            )
            assert rank.rates == pytest.approx(plain.rates), "lr_scheduler_step gives the rate that the step used"
            assert_moved_alike(rank.end, plain.end, plain.start, limit=self.bounds.trained)

    @offered(Capability.PACKED)
    def test_packed_rows_train_as_padded_ones(self, world_size: int) -> None:
        ranks = self.trained(world_size, num_micro=2, **PACKED)
        self.check_outputs(ranks)
        self.check_losses(ranks)
        self.check_gradient(ranks)

    @offered(Capability.PACKED)
    def test_packed_rows_do_not_see_each_other(self) -> None:
        batch, other = make_batch((20, 20)), make_batch((20, 20))
        other["input_ids"][0] = other["input_ids"][0].flip(0)
        rows = [batch, other]
        ranks = self.on(self.alone(), infer_each, self.model_of_suite(), rows, self.outputs(), **PACKED)
        for before, after in (rank for rank in ranks if rank[0] is not None):
            assert before is not None
            assert after is not None
            for name in self.outputs():
                assert_close(before[name][1], after[name][1], atol=self.bounds.atol, rtol=self.bounds.layout, what=name)
                assert (before[name][0] - after[name][0]).abs().max() > 1e-2

    @offered(Capability.PACKED)
    def test_the_plan_says_that_rows_are_packed(self) -> None:
        plan = self.planned(self.alone(), self.model_of_suite(), **PACKED)
        assert plan is None or plan.limits.packed

    @absent(Capability.PACKED)
    def test_packing_is_refused(self) -> None:
        with pytest.raises(Refused):
            self.planned(self.alone(), self.model_of_suite(), **PACKED)

    def test_each_micro_batch_has_its_own_results_in_order(self, world_size: int) -> None:
        batch, plain = BATCHES[0], self.plain().outputs
        assert plain is not None
        model, outputs = self.model_of_suite(), self.outputs()
        ranks = [r for r in self.on(world_size, infer_parts, model, batch, outputs, self.loss()) if r is not None]
        dp_size = 1 + max(dp_rank for dp_rank, _ in ranks)
        total = {}
        for dp_rank, parts in ranks:
            mine = torch.arange(len(batch))[dp_rank::dp_size]
            number = len(parts)
            for rows, (values, with_gradient, _) in zip(mine.tensor_split(number), parts, strict=True):
                assert values.keys() == outputs, "outputs are those that were asked for"
                assert not with_gradient, "outputs are detached"
                for name, value in values.items():
                    width = value.shape[1]
                    assert_close(
                        value, plain[name][rows, :width], atol=self.bounds.atol, rtol=self.bounds.rtol, what=name
                    )
            total[dp_rank] = sum(metrics["loss"] for *_, metrics in parts)
        assert sum(total.values()) == pytest.approx(self.plain().losses[0], rel=self.bounds.evaluated), (
            "an evaluation's loss"
        )

    def test_outputs_are_of_the_temperature_of_the_call(self) -> None:
        """A value has no temperature."""
        warm = (1.3, 1.0)
        ranks = self.on(self.alone(), infer_each, self.model_of_suite(), BATCHES[:1], self.outputs(), warm)
        reference = PlainTrainer(self.model_of_suite(), value_model=self.is_value())
        with torch.no_grad():
            want = [reference.outputs(BATCHES[0], temperature) for temperature in warm]
        for rank in ranks:
            for values, plain in zip(rank, want, strict=True):
                for name in values or ():
                    assert values is not None
                    self.assert_near(values[name], plain[name], name)

    def test_top_log_probs_are_those_of_the_given_ids_in_value_and_gradient(self, world_size: int) -> None:
        """Where the plan's limits offer them; a batch without `teacher_ids` is refused then."""
        plan = self.planned(world_size, self.model_of_suite())
        if plan is None or "top_log_probs" not in plan.limits.outputs or self.is_value():
            return
        batch, loss = with_teacher(BATCHES[0]), DistillationLoss()
        trainer = PlainTrainer(self.model_of_suite(), PLAIN_STEP)
        start, outputs = trainer.weights(), trainer.outputs(batch)["top_log_probs"].detach()
        (_, norm), end = trainer.step(batch, loss), trainer.weights()
        for values, have, end_weights, answer in self.on(
            world_size, distil, self.model_of_suite(), batch, BATCHES[0], loss
        ):
            if values is not None:
                assert_close(
                    values["top_log_probs"], outputs, atol=self.bounds.atol, rtol=self.bounds.rtol, what="top_log_probs"
                )
            assert have == pytest.approx(norm, rel=self.bounds.relative)
            assert_moved_alike(end_weights, end, start, limit=self.bounds.movement)
            assert answer.startswith("refused"), f"a batch without teacher_ids: {answer}"

    def test_filler_rows_change_nothing(self) -> None:
        """Rows of weight zero, one of them without a token."""
        filled = make_batch((9, 5, 7, 0, 4, 6, 2, 8), advantage=0.5)
        filled["row_weight"][3] = filled["row_weight"][6] = 0.0
        real = select(filled, torch.tensor([0, 1, 2, 4, 5, 7]))
        trainer = PlainTrainer(self.model_of_suite(), PLAIN_STEP, value_model=self.is_value())
        start, (loss, norm), end = trainer.weights(), trainer.step(real), trainer.weights()
        world_size = self.worlds_used()[-1]
        ranks = self.on(world_size, step_once, self.model_of_suite(), filled, self.loss())
        for _, have, values in ranks:
            assert have == pytest.approx(norm, rel=self.bounds.relative)
            assert_moved_alike(values, end, start, limit=self.bounds.movement)
        assert loss

    def test_matrices_decay_and_norms_and_biases_do_not(self) -> None:
        """With no gradient, matrices shrink by lr * weight_decay and the rest stays."""
        batch = make_batch()
        batch["row_weight"].zero_()
        scale_batch = batch.clone()
        optimizer = OptimizerConfig(lr=1e-2, weight_decay=0.5)
        model = self.model_of_suite()
        ranks = self.on(self.worlds_used()[-1], decay_once, model, scale_batch, self.loss(), optimizer)
        for before, after in ranks:
            for name, value in before.items():
                want = value * (1 - 1e-2 * 0.5) if value.ndim > 1 else value
                assert_close(after[name], want, atol=1e-6, rtol=1e-5, what=f"{name}, after decay")

    # What is compared

    def alone(self) -> int:
        """The smallest world, for what doesn't depend on it."""
        return self.worlds_used()[0]

    def check_outputs(self, ranks: list[Trained]) -> None:
        want, empty = self.plain().outputs, ~BATCHES[0]["response_mask"]
        assert want is not None
        having = [rank.outputs for rank in ranks if rank.outputs is not None]
        assert having, "no rank gave results"
        assert all(rank.outputs is not None for rank in ranks if rank.is_collect), "a collected rank gave no results"
        for values in having:
            assert values.keys() == want.keys()
            for name, value in want.items():
                assert values[name].dtype == torch.float32
                assert values[name][empty].eq(0).all(), f"{name} is 0 at position 0 and in padding"
                self.assert_near(values[name], value, name)

    def check_losses(self, ranks: list[Trained]) -> None:
        for number, want in enumerate(self.plain().losses):
            have = sum(rank.losses[number] for rank in ranks if rank.is_collect)
            assert have == pytest.approx(want, rel=self.bounds.relative), f"loss of step {number}"

    def check_gradient(self, ranks: list[Trained]) -> None:
        """What a plain step moves is the gradient; and its norm, by itself."""
        plain = self.plain()
        for rank in ranks:
            assert rank.norms == pytest.approx(plain.norms, rel=self.bounds.relative), "norm of the gradient, by step"
            assert_moved_alike(rank.end, plain.end, plain.start, limit=self.bounds.movement)


def decay_once(
    rank: int,
    world_size: int,
    subject: Subject,
    model: str,
    batch: TensorDict,
    loss: LossFn,
    optimizer: OptimizerConfig,
) -> tuple[Tensors, Tensors]:
    with engine_of(subject, model, optimizer) as engine:
        before = weights(engine)
        with engine.train_mode():
            engine.optimizer_zero_grad()
            engine.forward_backward(micro_batches(engine, batch), loss, scale_of(make_batch()), temperature=TEMPERATURE)
            engine.optimizer_step()
        return before, weights(engine)
