"""The policy loss of GRPO and PPO: a clipped policy gradient, with KL to a reference and entropy where
asked for.

Sources: PPO (arXiv 1707.06347), GRPO (arXiv 2402.03300), the asymmetric clip and the token mean of DAPO
(arXiv 2503.14476), KL estimators k1, k2, k3 (J. Schulman, "Approximating KL divergence", 2020).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs
import torch
from tensordict import TensorDict

from core.config import structure
from core.errors import ConfigError
from core.loss import LossScale, Metric

KlEstimator = Literal["k1", "k2", "k3"]

# exp(20) is 5e8: a log-ratio beyond it is a lost sample, and its exponential would drown the step in inf.
MAX_LOG_RATIO = 20.0


@attrs.frozen
class PolicyLoss:
    """A micro-batch's share of the policy loss; implements `core.LossFn`.

    Reads `log_probs` (and `entropy` with entropy_coef) of the outputs, and `old_log_probs`, `advantages`,
    `response_mask`, `row_weight` (1 where absent) and `ref_log_probs` (with kl_coef) of the micro-batch:
    all padded, (rows, tokens) and aligned with input_ids; row_weight is (rows,).

    Metrics, over response tokens * row_weight of the whole step: `clip_fraction`, `approx_kl` (k3 of the
    old policy against the new one), `ratio_max`, and `ref_kl` with kl_coef.
    """

    clip_low: float = 0.2  # the ratio is clipped to 1 - clip_low ..
    clip_high: float = 0.2  # .. 1 + clip_high; DAPO takes 0.28
    kl_coef: float = 0.0  # 0: no reference policy
    kl_estimator: KlEstimator = "k3"  # k2's gradient is the KL's own; k1's is zero in the mean
    entropy_coef: float = 0.0
    normalise: Literal["token-mean", "sequence-mean"] = "token-mean"

    def __attrs_post_init__(self) -> None:
        if not 0 < self.clip_low <= 1:
            raise ConfigError("illegal clip_low", have=self.clip_low, want="above 0, at most 1")
        if self.clip_high <= 0:
            raise ConfigError("illegal clip_high", have=self.clip_high, want="above 0")
        if self.kl_coef < 0:
            raise ConfigError("illegal kl_coef", have=self.kl_coef, want="0 (no reference policy) or more")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"log_probs", "entropy"} if self.entropy_coef else {"log_probs"})

    @property
    def reads(self) -> frozenset[str]:
        columns = {"old_log_probs", "advantages", "response_mask"}
        return frozenset(columns | {"ref_log_probs"} if self.kl_coef else columns)

    def __call__(
        self, outputs: Mapping[str, torch.Tensor], batch: TensorDict, scale: LossScale
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        log_probs, old, advantages = outputs["log_probs"], batch["old_log_probs"], batch["advantages"]
        weights = batch["response_mask"].to(log_probs.dtype)
        if (row_weight := batch.get("row_weight", None)) is not None:
            weights = weights * row_weight[:, None]
        counted = weights > 0

        # Tokens that don't count are made neutral before exp, so that no inf of theirs reaches the gradient
        # as nan.
        log_ratio = torch.where(counted, log_probs - old, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        plain, limited = ratio * advantages, clipped * advantages
        losses = -torch.minimum(plain, limited)
        sums = {"clip_fraction": limited < plain, "approx_kl": (-log_ratio).exp() - 1 + log_ratio}
        if self.kl_coef:
            to_ref = torch.where(counted, batch["ref_log_probs"] - log_probs, 0.0)
            sums["ref_kl"] = kl_divergence(to_ref, self.kl_estimator)
            losses = losses + self.kl_coef * sums["ref_kl"]
        if self.entropy_coef:
            losses = losses - self.entropy_coef * torch.where(counted, outputs["entropy"], 0.0)
        return self._mean(losses, weights, scale), _metrics(sums, ratio, weights)

    def _mean(self, losses: torch.Tensor, weights: torch.Tensor, scale: LossScale) -> torch.Tensor:
        """This micro-batch's share of the mean of (rows, tokens) over the whole step."""
        weighted = losses * weights
        if self.normalise == "token-mean":
            return weighted.sum() / max(scale.num_tokens, 1.0)
        lengths = (weights > 0).sum(1).clamp(min=1)
        return (weighted.sum(1) / lengths).sum() / max(scale.num_rows, 1.0)


def policy_loss(**options: Any) -> PolicyLoss:
    """The factory that `LossSpec` names.

    Raises:
        ConfigError: an option is unknown or illegal.
    """
    return structure(PolicyLoss, options, "loss")


def kl_divergence(log_ratio: torch.Tensor, estimator: KlEstimator) -> torch.Tensor:
    """Estimate of KL(policy || reference) at every sampled token, from log_ratio = log reference - log
    policy."""
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.exp() - 1 - log_ratio


@torch.no_grad()
def _metrics(sums: Mapping[str, torch.Tensor], ratio: torch.Tensor, weights: torch.Tensor) -> dict[str, Metric]:
    # One transfer from the device for all of them. 0 is below every ratio, so a micro-batch of filler
    # changes no maximum.
    values = [weights.sum(), torch.where(weights > 0, ratio, 0.0).amax()]
    values += [(value * weights).sum() for value in sums.values()]
    weight, ratio_max, *totals = torch.stack([value.double() for value in values]).tolist()
    metrics = {name: Metric(total, weight) for name, total in zip(sums, totals, strict=True)}
    return {**metrics, "ratio_max": Metric(ratio_max, how="max")}
