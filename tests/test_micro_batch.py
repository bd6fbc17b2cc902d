"""The planner of micro-batches: every row once, within the budget, as many on each rank, and back in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ConfigError
from manymesh.workers.micro_batch import MicroBatchConfig, plan_micro_batches, round_up, widen

row_lengths = st.lists(st.integers(1, 50), min_size=1, max_size=40)


@given(row_lengths, st.integers(1, 8), st.integers(1, 120), st.booleans(), st.sampled_from([1, 4]))
def test_every_row_is_in_one_micro_batch_and_only_rows_that_are_alone_exceed_the_budget(
    lengths: list[int], max_rows: int, max_tokens: int, packed: bool, multiple: int
) -> None:
    config = MicroBatchConfig(max_rows=max_rows, max_tokens=max_tokens)
    plan = plan_micro_batches(lengths, config, packed=packed, sequence_multiple=multiple)
    assert sorted(row for part in plan for row in part) == list(range(len(lengths)))
    for part in plan:
        widths = [-(-lengths[row] // multiple) * multiple for row in part]
        cost = sum(widths) if packed else max(widths) * len(part)
        assert len(part) <= max_rows
        assert cost <= max_tokens or len(part) == 1


@given(row_lengths)
def test_rows_of_like_length_meet_and_the_longest_come_first(lengths: list[int]) -> None:
    plan = plan_micro_batches(lengths, MicroBatchConfig(max_rows=3, max_tokens=None))
    flat = [lengths[row] for part in plan for row in part]
    assert flat == sorted(lengths, reverse=True)


@given(row_lengths, st.integers(1, 50))
def test_widening_reaches_the_agreed_number_and_loses_no_row(lengths: list[int], count: int) -> None:
    plan = plan_micro_batches(lengths, MicroBatchConfig(max_rows=4))
    wider = widen(plan, lengths, count)
    assert len(wider) == max(count, len(plan))
    assert sorted(row for part in wider for row in part) == list(range(len(lengths)))
    if len(wider) <= len(lengths):
        assert all(wider)


def test_a_padded_micro_batch_costs_its_width_and_a_packed_one_its_tokens() -> None:
    lengths, config = [10, 1, 1, 1], MicroBatchConfig(max_tokens=20)
    assert [len(part) for part in plan_micro_batches(lengths, config)] == [2, 2]
    assert [len(part) for part in plan_micro_batches(lengths, config, packed=True)] == [4]


def test_numbers_of_micro_batches_are_rounded_up_to_what_the_engine_asks_for() -> None:
    assert [round_up(n, 4) for n in (1, 4, 5)] == [4, 4, 8]


def test_a_budget_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_rows"):
        MicroBatchConfig(max_rows=0)
