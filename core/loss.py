"""Losses, what they are divided by, and the metrics that they give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import attrs

from core.errors import BadAnswer

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict


How = Literal["mean", "sum", "max", "min", "same"]


@attrs.frozen
class Metric:
    """One number that can be joined over micro-batches (by the worker) and over dp (by collect).

    Attributes:
        total: for "mean" the weighted sum, else the value.
        weight: for "mean" the sum of weights.
        how: "mean" is sum(total) / sum(weight); "same" refuses to join values that differ.
    """

    total: float
    weight: float = 1.0
    how: How = "mean"

    @property
    def value(self) -> float:
        if self.how != "mean":
            return self.total
        return self.total / self.weight if self.weight else float("nan")

    @staticmethod
    def join(metrics: Sequence[Metric], where: str = "") -> Metric:
        """Raises BadAnswer where the metrics are to be joined in different ways, or "same" ones differ."""
        hows = {metric.how for metric in metrics}
        if len(hows) != 1:
            raise BadAnswer("metrics of one name are joined in different ways", have=sorted(hows), where=where)
        how = hows.pop()
        totals = [metric.total for metric in metrics]
        if how in ("mean", "sum"):
            return Metric(sum(totals), sum(metric.weight for metric in metrics), how)
        if how == "same" and len(set(totals)) > 1:
            raise BadAnswer("a metric that must be the same everywhere differs", have=totals, where=where)
        return Metric(min(totals) if how == "min" else max(totals), 1.0, how)

    @staticmethod
    def join_all(parts: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
        """Join dictionaries of metrics key by key, in order of first appearance."""
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: Metric.join([part[name] for part in parts if name in part], name) for name in names}


@attrs.frozen
class LossScale:
    """Denominators over all ranks of one optimizer step."""

    num_tokens: float  # sum of response_mask * row_weight
    num_rows: float  # sum of row_weight


class LossFn(Protocol):
    """A micro-batch's share of a step's loss.

    `needs` names the model outputs it reads: "log_probs", "entropy", "values", or "top_log_probs", which are the
    log-probs of the ids in the batch's column `teacher_ids`. Gradients flow through all of them. It may also have
    `reads`, the columns that a micro-batch must have: a batch that lacks one is then refused.
    A loss that needs several rows at once reads `group_id`: rows that share it are in one micro-batch, one after the
    other. Where one of them is filler all are.
    Outputs and micro-batch are padded, (rows, tokens), and (rows, tokens, k) for the teacher's ids. The share is
    already divided by `scale`, so that the loss is a plain sum over micro-batches and dp ranks. It sees whole rows
    whatever sp or cp do.
    """

    needs: frozenset[str]

    def __call__(
        self, outputs: Mapping[str, torch.Tensor], batch: TensorDict, scale: LossScale
    ) -> tuple[torch.Tensor, dict[str, Metric]]: ...


@attrs.frozen
class LossSpec:
    """A loss that can be shipped to workers in any environment: 'module:factory', called with the options."""

    factory: str
    options: Mapping[str, Any] = attrs.field(factory=dict)
