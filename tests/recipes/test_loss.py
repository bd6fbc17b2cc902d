"""The policy loss against plain formulas, its gradient, and its independence of how rows are cut."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from core.errors import ConfigError
from core.loss import LossScale, LossSpec, Metric
from manymesh.recipes.grpo.loss import KlEstimator, PolicyLoss, kl_divergence, policy_loss


def make_batch(rows: Any = 6, tokens: int = 7, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """Random columns of unequal lengths, with a prompt at the start of each row and padding at its end."""
    draw = torch.Generator().manual_seed(seed)
    length = torch.randint(3, tokens + 1, (rows, 1), generator=draw)
    place = torch.arange(tokens)[None, :]
    mask = (place >= 2) & (place < length)

    def column(scale: float = 1.0) -> Any:
        return torch.randn(rows, tokens, generator=draw, dtype=dtype) * scale

    old = -column().abs() - 0.1
    batch = TensorDict(
        {
            "old_log_probs": old,
            "ref_log_probs": old + column(0.3),
            "advantages": column() * mask,
            "response_mask": mask,
            "row_weight": torch.ones(rows, dtype=dtype),
        },
        batch_size=[rows],
    )
    outputs = {"log_probs": old + column(0.3), "entropy": column().abs()}
    return outputs, batch


def scale_of(batch: TensorDict) -> Any:
    weights = batch["response_mask"] * batch["row_weight"][:, None]
    return LossScale(float(weights.sum()), float(batch["row_weight"].sum()))


def reference(loss: PolicyLoss, outputs: dict[str, torch.Tensor], batch: TensorDict) -> Any:
    """The loss, token by token in Python."""
    rows, tokens = batch["response_mask"].shape
    by_row, weights, counts = [], [], []
    for r in range(rows):
        total = 0.0
        count = 0
        for t in range(tokens):
            if not batch["response_mask"][r, t]:
                continue
            count += 1
            new, old, ref = (
                float(c[r, t]) for c in (outputs["log_probs"], batch["old_log_probs"], batch["ref_log_probs"])
            )
            advantage, ratio = float(batch["advantages"][r, t]), math.exp(new - old)
            clipped = min(max(ratio, 1 - loss.clip_low), 1 + loss.clip_high)
            total -= min(ratio * advantage, clipped * advantage)
            kl = {"k1": new - ref, "k2": (ref - new) ** 2 / 2, "k3": math.exp(ref - new) - 1 - (ref - new)}
            total += loss.kl_coef * kl[loss.kl_estimator]
            total -= loss.entropy_coef * float(outputs["entropy"][r, t])
        by_row.append(total)
        counts.append(count)
        weights.append(float(batch["row_weight"][r]))
    weighted = [w * x for w, x in zip(weights, by_row, strict=True)]
    if loss.normalise == "token-mean":
        return sum(weighted) / sum(w * c for w, c in zip(weights, counts, strict=True))
    return sum(x / max(c, 1) for x, c in zip(weighted, counts, strict=True)) / sum(weights)


LOSSES = [
    PolicyLoss(),
    PolicyLoss(clip_low=0.1, clip_high=0.28, normalise="sequence-mean"),
    *(PolicyLoss(kl_coef=0.5, kl_estimator=k, entropy_coef=0.01) for k in ("k1", "k2", "k3")),
]


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_is_what_the_formula_says_token_by_token(loss: PolicyLoss) -> None:
    outputs, batch = make_batch()
    batch["row_weight"][1] = 0.5
    value, _ = loss(outputs, batch, scale_of(batch))
    assert float(value) == pytest.approx(reference(loss, outputs, batch), rel=1e-9)


@pytest.mark.parametrize("loss", LOSSES)
def test_gradient_is_that_of_finite_differences(loss: PolicyLoss) -> None:
    outputs, batch = make_batch(rows=3)
    names = sorted(loss.needs)

    def of(*values: Any) -> Any:
        return loss(dict(zip(names, values, strict=True)), batch, scale_of(batch))[0]

    assert torch.autograd.gradcheck(of, [outputs[name].requires_grad_() for name in names])


def test_gradient_of_k3_pulls_the_policy_towards_a_reference_that_differs() -> None:
    # With no advantage only the KL acts: d/dnew [exp(ref - new) - 1 - (ref - new)] = 1 - exp(ref - new).
    outputs, batch = make_batch()
    batch["advantages"].zero_()
    log_probs = outputs["log_probs"].requires_grad_()
    loss = PolicyLoss(kl_coef=0.3)
    loss({"log_probs": log_probs}, batch, scale_of(batch))[0].backward()
    mask = batch["response_mask"]
    plain = 0.3 * (1 - (batch["ref_log_probs"] - log_probs.detach()).exp()) * mask / mask.sum()
    torch.testing.assert_close(log_probs.grad, plain)
    assert plain.abs().max() > 1e-3


def test_tokens_outside_the_clip_have_no_gradient_where_the_clip_binds() -> None:
    mask = torch.ones(1, 4, dtype=torch.bool)
    log_ratio = torch.tensor([[0.5, 0.5, -0.5, -0.5]])
    batch = TensorDict(
        {
            "old_log_probs": torch.zeros(1, 4),
            "advantages": torch.tensor([[1.0, -1.0, 1.0, -1.0]]),
            "response_mask": mask,
        },
        batch_size=[1],
    )
    log_probs = log_ratio.clone().requires_grad_()
    value, metrics = PolicyLoss(0.2, 0.28)({"log_probs": log_probs}, batch, LossScale(4, 1))
    value.backward()
    is_clipped = [[True, False, False, True]]
    gradient: Any = log_probs.grad
    assert (gradient == 0).tolist() == is_clipped
    assert metrics["clip_fraction"].value == 0.5


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(2, 9), seed=st.integers(0, 10_000), loss=st.sampled_from(LOSSES), data=st.data())
def test_shares_of_micro_batches_sum_to_the_loss_of_the_whole_however_rows_are_cut(
    rows: Any, seed: int, loss: PolicyLoss, data: Any
) -> None:
    outputs, batch = make_batch(rows, seed=seed)
    batch["row_weight"] = torch.tensor(
        data.draw(st.lists(st.sampled_from([0.0, 1.0, 0.5]), min_size=rows, max_size=rows)), dtype=torch.float64
    )
    part_of = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows)))
    scale = scale_of(batch)

    whole, metrics = loss(outputs, batch, scale)
    parts = []
    for part in part_of.unique():
        index = (part_of == part).nonzero().flatten()
        parts.append(loss({k: v[index] for k, v in outputs.items()}, batch[index], scale))

    assert float(sum(value for value, _ in parts)) == pytest.approx(float(whole), rel=1e-9, abs=1e-12)
    metrics_of_parts = Metric.join_all([each for _, each in parts])
    for name, metric in metrics.items():
        assert metrics_of_parts[name].value == pytest.approx(metric.value, rel=1e-9, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("normalise", ["token-mean", "sequence-mean"])
def test_filler_rows_change_neither_loss_nor_gradient_nor_metrics_even_with_absurd_values(normalise: Any) -> None:
    loss = PolicyLoss(kl_coef=0.1, entropy_coef=0.01, normalise=normalise)
    outputs, batch = make_batch(rows=4)
    alone = {name: value[:3].clone().requires_grad_() for name, value in outputs.items()}
    value, metrics = loss(alone, batch[:3], scale_of(batch[:3]))
    value.backward()

    batch["row_weight"][3] = 0
    batch["ref_log_probs"][3] = float("inf")
    outputs["log_probs"][3] = -1e6
    filled = {name: value.clone().requires_grad_() for name, value in outputs.items()}
    same, same_metrics = loss(filled, batch, scale_of(batch))
    same.backward()

    assert same.item() == pytest.approx(value.item())
    torch.testing.assert_close(filled["log_probs"].grad[:3], alone["log_probs"].grad)
    assert torch.equal(filled["log_probs"].grad[3], torch.zeros_like(batch["old_log_probs"][3]))
    for name, metric in metrics.items():
        assert same_metrics[name].value == pytest.approx(metric.value)


def test_metrics_are_means_over_response_tokens() -> None:
    outputs, batch = make_batch()
    mask = batch["response_mask"]
    _, metrics = PolicyLoss(kl_coef=0.1)(outputs, batch, scale_of(batch))
    log_ratio = (outputs["log_probs"] - batch["old_log_probs"])[mask]
    to_ref = (batch["ref_log_probs"] - outputs["log_probs"])[mask]
    assert metrics["ratio_max"].value == pytest.approx(float(log_ratio.exp().max()))
    assert metrics["approx_kl"].value == pytest.approx(float((log_ratio + (-log_ratio).exp() - 1).mean()))
    assert metrics["ref_kl"].value == pytest.approx(float((to_ref.exp() - 1 - to_ref).mean()))
    assert metrics["approx_kl"].weight == int(mask.sum())


def test_estimators_agree_with_the_kl_of_two_known_distributions() -> None:
    p, q = (torch.tensor(x, dtype=torch.float64) for x in ([0.5, 0.3, 0.2], [0.45, 0.3, 0.25]))
    exact = float((p * (p / q).log()).sum())
    tolerances: dict[KlEstimator, float] = {"k1": 1e-12, "k3": 1e-12, "k2": 0.05 * exact}
    for estimator, tolerance in tolerances.items():
        mean = float((p * kl_divergence((q / p).log(), estimator)).sum())
        assert mean == pytest.approx(exact, abs=tolerance)


def test_a_ratio_beyond_floating_point_gives_a_finite_loss() -> None:
    outputs, batch = make_batch(dtype=torch.float32)
    outputs["log_probs"][batch["response_mask"]] = 1e4
    value, metrics = PolicyLoss(kl_coef=0.1)(outputs, batch, scale_of(batch))
    assert math.isfinite(float(value))
    assert math.isfinite(metrics["ratio_max"].value)


def test_the_factory_takes_a_spec_s_options_and_refuses_unknown_ones_with_the_nearest() -> None:
    spec = LossSpec("manymesh.recipes.grpo.loss:policy_loss", {"clip_high": 0.28, "entropy_coef": 0.1})
    assert policy_loss(**spec.options) == PolicyLoss(clip_high=0.28, entropy_coef=0.1)
    assert policy_loss(**spec.options).needs == {"log_probs", "entropy"}
    assert PolicyLoss().needs == {"log_probs"}
    with pytest.raises(ConfigError, match="clip_hi") as refused:
        policy_loss(clip_hi=0.28)
    assert "clip_high" in refused.value.mend


@pytest.mark.parametrize(
    "options", [{"clip_low": 0}, {"clip_low": 1.5}, {"clip_high": -0.1}, {"kl_coef": -1}, {"normalise": "mean"}]
)
def test_illegal_options_are_refused(options: Any) -> None:
    with pytest.raises(ConfigError):
        policy_loss(**options)
