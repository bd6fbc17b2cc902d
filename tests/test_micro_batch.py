"""The planner of micro-batches: every row once, within the budget, as many on each rank, and back in order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ConfigError, Refused
from manymesh.workers.micro_batch import MicroBatchConfig, plan_micro_batches, round_up, widen

row_lengths = st.lists(st.integers(1, 50), min_size=1, max_size=40)
counts = st.integers(1, 9)


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


groups_of_rows = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 12)), min_size=1, max_size=40)


@given(groups_of_rows, st.integers(2, 8), st.integers(1, 400), st.booleans(), st.sampled_from([1, 4]), counts)
def test_a_group_is_whole_in_one_micro_batch_within_the_budget_or_is_refused(
    rows: list[tuple[int, int]], max_rows: int, max_tokens: int, packed: bool, multiple: int, count: int
) -> None:
    lengths = [length for length, _ in rows]
    groups = {name: [row for row, (_, group) in enumerate(rows) if group == name] for _, name in rows}
    config = MicroBatchConfig(max_rows=max_rows, max_tokens=max_tokens)

    def exceeds(part: Sequence[int]) -> bool:
        if len(part) < 2:
            return False
        widths = [round_up(lengths[row], multiple) for row in part]
        tokens = sum(widths) if packed else max(widths) * len(part)
        return len(part) > max_rows or tokens > max_tokens

    too_large = "|".join(str(name) for name, part in groups.items() if exceeds(part))
    if too_large:
        with pytest.raises(Refused, match=rf"group ({too_large}) (.|\n)*max_rows {max_rows}, max_tokens {max_tokens}"):
            plan_micro_batches(lengths, config, packed=packed, sequence_multiple=multiple, groups=groups)
        return
    plan = plan_micro_batches(lengths, config, packed=packed, sequence_multiple=multiple, groups=groups)
    wider = widen(plan, lengths, count, groups)
    assert len(wider) == max(count, len(plan))
    for micro_batches in (plan, wider):
        assert sorted(row for part in micro_batches for row in part) == list(range(len(lengths)))
        for part in micro_batches:
            assert not exceeds(part)
            ids = list(dict.fromkeys(rows[row][1] for row in part))
            assert part == [row for name in ids for row in groups[name]]  # in order, one after another
