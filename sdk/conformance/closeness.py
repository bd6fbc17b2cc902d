"""Comparisons of tensors whose message names the worst values, instead of whole tensors."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from sdk.reference import movement_error

NUM_WORST = 5


@attrs.frozen
class Bounds:
    """How near results must be to those of one process with a plain transformers model in fp32 on a CPU.

    Attributes:
        atol, rtol: of an engine's outputs (nats, or values), absolute and relative.
        layout: of an engine's outputs, packed against padded, relative.
        evaluated: error of an evaluation's loss, relative.
        relative: error of training's losses and of gradients' norms.
        movement: error of what a step moves, over the movement.
        trained: the same after steps with clipping, decay and a schedule.
        sampled: of a rollout, error of log-probs (nats), and how far below the likeliest token a greedy one may be.
    """

    atol: float
    rtol: float
    layout: float
    evaluated: float
    relative: float
    movement: float
    trained: float
    sampled: float


# By the dtype of a backend's passes, on models of the kit (two layers, 64 tokens, predictions far from uniform).
BOUNDS: Mapping[str, Bounds] = {
    "float32": Bounds(
        atol=2e-5, rtol=1e-4, layout=1e-5, evaluated=1e-4, relative=1e-3, movement=1e-3, trained=5e-3, sampled=1e-4
    ),
    "bfloat16": Bounds(
        atol=3e-2, rtol=2e-2, layout=2e-2, evaluated=2e-2, relative=2e-2, movement=5e-2, trained=2e-1, sampled=5e-1
    ),
}


def assert_close(have: torch.Tensor, want: torch.Tensor, *, atol: float, rtol: float, what: str = "") -> None:
    """As torch.testing.assert_close, for values.

    Raises:
        AssertionError: with the five values that are farthest beyond tolerance: where, have, want, relative error.
    """
    have, want = have.cpu(), want.cpu()
    if have.shape != want.shape or have.dtype != want.dtype:
        raise AssertionError(
            f"{what or 'tensor'}: have {tuple(have.shape)} {have.dtype}, want {tuple(want.shape)} {want.dtype}"
        )
    excess = (have - want).abs().double() - (atol + rtol * want.abs().double())
    excess = torch.where(have == want, -1.0, excess.nan_to_num(float("inf")))
    num_wrong = int((excess > 0).sum())
    if num_wrong:
        lines = [f"{what or 'tensor'}: {num_wrong} of {have.numel()} values differ (atol {atol:g}, rtol {rtol:g})"]
        raise AssertionError("\n".join([*lines, *worst_values(have, want, excess)]))


def worst_values(have: torch.Tensor, want: torch.Tensor, excess: torch.Tensor) -> list[str]:
    """A line for each of the values with the largest excess, above zero, at most five."""
    largest = excess.flatten().topk(min(NUM_WORST, excess.numel()))
    lines = []
    for beyond, at in zip(largest.values.tolist(), largest.indices, strict=True):
        if beyond > 0:
            place = [int(each) for each in torch.unravel_index(at, have.shape)]
            a, b = float(have[tuple(place)]), float(want[tuple(place)])
            relative = abs(a - b) / abs(b) if b else float("inf")
            lines.append(f"  at {place}: have {a:.9g}, want {b:.9g}, relative error {relative:.2g}")
    return lines


def assert_moved_alike(
    have: Mapping[str, torch.Tensor],
    want: Mapping[str, torch.Tensor],
    start: Mapping[str, torch.Tensor],
    *,
    limit: float,
    what: str = "weights",
) -> None:
    """Training moved the weights to where they are wanted: the error's norm over the movement's norm is below a limit.

    Raises:
        AssertionError: with the five tensors that contribute most to the error, and each one's worst value.
    """
    error = movement_error(have, want, start)
    if error < limit:
        return
    share = {name: float((have[name].double() - want[name].double()).norm()) for name in want}
    lines = [f"{what}: error over movement {error:.3g}, want below {limit:g}; tensors by their part in it:"]
    for name in sorted(share, key=lambda name: share[name], reverse=True)[:NUM_WORST]:
        difference = (have[name].double() - want[name].double()).abs().nan_to_num(float("inf"))
        (line, *_) = worst_values(have[name], want[name], difference) or ["  (equal)"]
        lines.append(f"{name}: norm of the error {share[name]:.3g}; worst{line}")
    raise AssertionError("\n".join(lines))
