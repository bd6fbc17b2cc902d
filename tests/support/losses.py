"""Losses that tests train with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorDict

from core.loss import LossScale, Metric


class PairLoss:
    """Of each two rows with one `group_id` the first shall be likelier than the second, as in DPO. Fails where it gets
    one row of a pair without the other."""

    needs = frozenset({"log_probs"})
    reads = frozenset({"response_mask", "group_id"})

    def __call__(
        self, outputs: Mapping[str, torch.Tensor], batch: TensorDict, scale: LossScale
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        _, pair, counts = torch.unique(batch["group_id"], return_inverse=True, return_counts=True)
        if not bool((counts == 2).all()):
            raise ValueError(f"pairs are parted: {batch['group_id'].tolist()}")
        first, second = torch.argsort(pair, stable=True).reshape(-1, 2).unbind(1)
        score = (outputs["log_probs"] * batch["response_mask"]).sum(1)
        weight = batch.get("row_weight", torch.ones(len(pair)))[first]
        losses = -torch.nn.functional.logsigmoid(0.1 * (score[first] - score[second]))
        return (losses * weight).sum() / (scale.num_rows / 2), {"pairs": Metric(float(weight.sum()), how="sum")}
