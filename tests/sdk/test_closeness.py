"""Comparisons of the kit fail where torch's own do, and say which values are worst."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sdk.conformance.closeness import assert_close, assert_moved_alike

VALUES = st.sampled_from([0.0, 1.0, 1.00001, 1.1, -1.0, 1e-6, float("nan"), float("inf"), float("-inf")])


def fails(check: object, *args: object, **options: object) -> bool:
    try:
        check(*args, **options)  # type: ignore[operator]
    except AssertionError:
        return True
    return False


@settings(deadline=None)
@given(st.lists(st.tuples(VALUES, VALUES), max_size=6))
def test_values_are_close_where_torch_says_so(pairs: list[tuple[float, float]]) -> None:
    have, want = (torch.tensor([pair[side] for pair in pairs]) for side in (0, 1))
    tolerance = {"atol": 1e-5, "rtol": 1e-4}
    assert fails(assert_close, have, want, **tolerance) is fails(torch.testing.assert_close, have, want, **tolerance)


def test_the_five_worst_values_are_said_with_place_and_relative_error() -> None:
    want = torch.ones(4, 3)
    have = want.clone()
    have[2, 1], have[0, 0] = 3.0, 1.5
    with pytest.raises(AssertionError) as failure:
        assert_close(have, want, atol=1e-5, rtol=1e-4, what="log_probs")
    assert str(failure.value).splitlines() == [
        "log_probs: 2 of 12 values differ (atol 1e-05, rtol 0.0001)",
        "  at [2, 1]: have 3, want 1, relative error 2",
        "  at [0, 0]: have 1.5, want 1, relative error 0.5",
    ]
    with pytest.raises(AssertionError) as failure:
        assert_close(torch.zeros(4, 3), want, atol=1e-5, rtol=1e-4)
    assert len(str(failure.value).splitlines()) == 6
    with pytest.raises(AssertionError, match=r"have .4, 3. torch.float32, want .3, 4. torch.float32"):
        assert_close(want, torch.ones(3, 4), atol=0, rtol=0)


def test_weights_that_moved_otherwise_are_named_with_their_worst_value() -> None:
    start = {f"layer.{i}": torch.zeros(2, 2) for i in range(7)}
    want = {name: tensor + 1 for name, tensor in start.items()}
    assert_moved_alike({name: tensor + 1e-5 for name, tensor in want.items()}, want, start, limit=1e-3)
    have = {name: tensor + (0.1 * (name == "layer.3")) * torch.eye(2)[0] for name, tensor in want.items()}
    with pytest.raises(AssertionError) as failure:
        assert_moved_alike(have, want, start, limit=1e-3, what="the next step")
    first, second, *others = str(failure.value).splitlines()
    assert first.startswith("the next step: error over movement 0.0267, want below 0.001")
    assert second.startswith("layer.3: norm of the error 0.141; worst  at [")
    assert len(others) == 4
    have["layer.3"][1, 1] = float("nan")
    with pytest.raises(AssertionError, match="nan"):
        assert_moved_alike(have, want, start, limit=1e-3)
