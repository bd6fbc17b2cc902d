"""Faults of an engine's numbers. Faults of engines know the protocol, not the engine, but for the schedule's place in a
checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from tensordict import TensorDict

from core.engine import MicroResult, StepInfo
from core.loss import LossScale
from tests.sdk.kit.faults import Fault, caught_by

SUM = "test_the_gradient_is_the_sum_of_shares_over"


class PassFault(Fault):
    """Changes what a pass is given, the loss, or what comes of it."""

    def change_batches(self, batches: list[TensorDict], training: bool) -> list[TensorDict]:
        return batches

    def share(self, share: torch.Tensor, num_micro: int) -> torch.Tensor:
        return share

    def results(self, results: list[MicroResult], batches: Sequence[TensorDict]) -> list[MicroResult]:
        return results

    def change_outputs(
        self, results: list[MicroResult], change: Callable[[torch.Tensor], torch.Tensor]
    ) -> list[MicroResult]:
        """Results with every output changed."""

        def of(batch: TensorDict) -> TensorDict:
            return TensorDict({name: change(value) for name, value in batch.items()}, batch.batch_size)

        return [each if each.outputs is None else attrs.evolve(each, outputs=of(each.outputs)) for each in results]

    def forward_backward(
        self,
        micro_batches: Sequence[TensorDict],
        loss_fn: Any,
        scale: LossScale,
        *,
        temperature: float = 1.0,
        forward_only: bool = False,
        outputs: frozenset[str] = frozenset(),
    ) -> list[MicroResult] | None:
        loss = None if loss_fn is None else FaultyLoss(loss_fn, self, len(micro_batches))
        batches = self.change_batches(list(micro_batches), not forward_only)
        results = super().forward_backward(  # type: ignore[misc]
            batches, loss, scale, temperature=temperature, forward_only=forward_only, outputs=outputs
        )
        return results and self.results(results, micro_batches)


class FaultyLoss:
    def __init__(self, inner: Any, fault: PassFault, num_micro: int) -> None:
        self.inner, self.needs, self.fault, self.num_micro = inner, inner.needs, fault, num_micro

    def __call__(self, outputs: Any, batch: Any, scale: Any) -> Any:
        share, metrics = self.inner(outputs, batch, scale)
        return self.fault.share(share, self.num_micro), metrics


@caught_by("test_outputs_are_aligned_with_tokens_and_zero_elsewhere", "test_each_micro_batch_has_its_own_results")
class PermutesRows(PassFault):
    """gives a micro-batch's rows in another order"""

    def results(self, results: list[MicroResult], batches: Sequence[TensorDict]) -> list[MicroResult]:
        return self.change_outputs(results, lambda value: value.flip(0))


@caught_by("test_each_micro_batch_has_its_own_results_in_order")
class PermutesMicroBatches(PassFault):
    """gives results in another order than the micro-batches'"""

    def results(self, results: list[MicroResult], batches: Sequence[TensorDict]) -> list[MicroResult]:
        return results[::-1]


@caught_by("test_outputs_are_aligned_with_tokens_and_zero_elsewhere")
class ShiftsOutputs(PassFault):
    """gives log-probs one token too early"""

    def results(self, results: list[MicroResult], batches: Sequence[TensorDict]) -> list[MicroResult]:
        return self.change_outputs(results, lambda value: value.roll(-1, 1))


@caught_by("test_outputs_are_of_the_temperature_of_the_call")
class IgnoresTemperature(PassFault):
    """ignores the temperature"""

    def forward_backward(self, *args: Any, temperature: float = 1.0, **options: Any) -> list[MicroResult] | None:
        return super().forward_backward(*args, temperature=1.0, **options)


@caught_by(f"{SUM}_micro_batches")
class DropsLastMicroBatch(PassFault):
    """trains on all micro-batches but the last"""

    def change_batches(self, batches: list[TensorDict], training: bool) -> list[TensorDict]:
        return batches[: max(1, len(batches) - 1)] if training else batches


@caught_by(f"{SUM}_micro_batches")
class AveragesMicroBatches(PassFault):
    """averages the gradient over micro-batches"""

    def share(self, share: torch.Tensor, num_micro: int) -> torch.Tensor:
        return share / num_micro


@caught_by(f"{SUM}_dp_ranks[world 2]")
class AveragesRanks(PassFault):
    """averages the gradient over dp ranks"""

    def share(self, share: torch.Tensor, num_micro: int) -> torch.Tensor:
        return share / self.mesh.dp_size  # type: ignore[no-any-return]


@caught_by("test_filler_rows_change_nothing")
class CountsFiller(PassFault):
    """counts filler rows as real ones"""

    def change_batches(self, batches: list[TensorDict], training: bool) -> list[TensorDict]:
        return [batch.copy().set("row_weight", torch.ones_like(batch["row_weight"])) for batch in batches]


@caught_by("test_evaluations_and_dropped_gradients_do_not_count", f"{SUM}_dp_ranks")
class ForgetsToZero(Fault):
    """forgets to zero gradients"""

    def optimizer_zero_grad(self) -> None:
        pass


@caught_by("test_clipped_and_scheduled_steps_are_those_of_one_process")
class ClippedNorm(Fault):
    """gives the norm after clipping"""

    def optimizer_step(self) -> StepInfo:
        info: StepInfo = super().optimizer_step()  # type: ignore[misc]
        return attrs.evolve(info, grad_norm=min(info.grad_norm, 0.5))


@caught_by("test_clipped_and_scheduled_steps_are_those_of_one_process", "test_the_schedule_is_the_one_of_the_options")
class NextRate(Fault):
    """gives the next step's learning rate instead of the one just used"""

    def lr_scheduler_step(self) -> float:
        super().lr_scheduler_step()  # type: ignore[misc]
        return float(self._training().lr)


@caught_by("test_gradients_that_are_not_finite_change_nothing")
class SkipsSilently(Fault):
    """doesn't say that it skipped a step"""

    def optimizer_step(self) -> StepInfo:
        return attrs.evolve(super().optimizer_step(), skipped=False)  # type: ignore[misc,no-any-return]
