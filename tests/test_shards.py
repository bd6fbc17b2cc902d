"""How rows are dealt: each exactly once, groups whole, tokens near-equal, and sizes that the policy promises."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core._rows.balance import balanced_parts
from core._rows.shards import Block, Shard, Uneven, are_in_order, deal_rows, rows_of_groups, runs_of
from core.errors import Refused


def sizes(rows: int, dp_size: int, uneven: Uneven, num_blocks: int = 1) -> list[int]:
    return [sum(shard.sizes) for shard in deal_rows(rows, dp_size, num_blocks, "a test", uneven)]


def rows_of(block: Block) -> list[int]:
    return [row for start, stop in block.rows for row in range(start, stop)]


@pytest.mark.parametrize(
    ("rows", "dp_size", "expected"),
    [(10, 3, [4, 3, 3]), (146, 4, [37, 37, 36, 36]), (9, 4, [3, 2, 2, 2]), (124, 15, [9] * 4 + [8] * 11)],
)
def test_ragged_shards_differ_by_at_most_one_and_the_first_get_more(
    rows: int, dp_size: int, expected: list[int]
) -> None:
    assert sizes(rows, dp_size, "ragged") == expected


def test_padded_shards_are_even_and_filler_comes_last() -> None:
    shards = deal_rows(10, 4, 1, "a test", "pad")
    assert [shard.row_numbers() for shard in shards] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, -1, -1]]
    assert shards[3].ranges() == [(9, 10), (9, 10), (9, 10)]  # filler is copies of the row before it
    assert [shard.row_numbers() for shard in deal_rows(2, 4, 1, "a test", "pad")] == [[0], [1], [-1], [-1]]


def test_every_mini_batch_has_real_rows_when_it_is_padded() -> None:
    shards = deal_rows(5, 2, 4, "a test", "pad")
    assert [shard.row_numbers() for shard in shards] == [[0, 2, 3, 4], [1, -1, -1, -1]]


def test_runs_of_rows_that_follow_one_another_are_one_range() -> None:
    (shard,) = deal_rows(1_000_000, 1, 4, "a test")
    assert shard.ranges() == [(0, 1_000_000)]
    assert are_in_order((shard,))
    assert not are_in_order(deal_rows(8, 2, 2, "a test"))
    assert not are_in_order(deal_rows(3, 2, 1, "a test", "pad"))


counts = st.integers(1, 6)
policies: st.SearchStrategy[Uneven] = st.sampled_from(["error", "pad", "ragged"])


@given(st.data(), counts, counts, st.integers(1, 90), policies, st.booleans(), st.booleans())
def test_rows_are_dealt_each_once_and_as_the_policy_promises(
    data: st.DataObject, dp_size: int, num_blocks: int, rows: int, uneven: Uneven, by_tokens: bool, grouped: bool
) -> None:
    def column(largest: int) -> list[int]:
        return data.draw(st.lists(st.integers(0, largest), min_size=rows, max_size=rows))

    tokens = column(50) if by_tokens else None
    groups = column(40) if grouped else None
    members = list(rows_of_groups(groups).values()) if groups else [[row] for row in range(rows)]
    try:
        shards = deal_rows(rows, dp_size, num_blocks, "a test", uneven, tokens=tokens, groups=groups)
    except Refused:
        assert uneven == "error" or len(members) < dp_size * num_blocks
        return
    assert {len(shard.blocks) for shard in shards} == {num_blocks}
    numbers = [row for shard in shards for row in shard.row_numbers()]
    assert sorted(row for row in numbers if row >= 0) == list(range(rows))
    units = {row: unit for unit, of_unit in enumerate(members) for row in of_unit}
    one_rank = deal_rows(rows, 1, num_blocks, "a test", uneven, tokens=tokens, groups=groups)[0]
    real_of_blocks = []
    totals = [0] * dp_size
    for number, blocks in enumerate(zip(*(shard.blocks for shard in shards), strict=True)):
        real = [{units[row] for row in rows_of(block)} for block in blocks]
        sizes = [len(of_rank) + len(block.filler) for of_rank, block in zip(real, blocks, strict=True)]
        assert max(sizes) - min(sizes) <= (uneven == "ragged")
        totals = [total + size for total, size in zip(totals, sizes, strict=True)]
        assert uneven == "pad" or not any(block.filler for block in blocks)
        for block in blocks:
            for copy in block.filler:  # a whole group
                assert [row for start, stop in copy for row in range(start, stop)] in members
        # Rows of a group lie one behind the other, on one rank and in one block.
        assert sum(map(len, real)) == len(set().union(*real))
        for of_rank, block in zip(real, blocks, strict=True):
            assert rows_of(block) == [row for unit in sorted(of_rank) for row in members[unit]]
        # The same rows for any dp size.
        assert sorted(row for block in blocks for row in rows_of(block)) == sorted(rows_of(one_rank.blocks[number]))
        real_of_blocks.append(sum(map(len, real)))
    assert max(totals) - min(totals) <= (uneven == "ragged")
    assert max(real_of_blocks) - min(real_of_blocks) <= 1


@given(st.data(), counts, counts, st.integers(1, 40), st.integers(1, 3), policies, st.booleans())
def test_answers_find_back_to_the_drivers_order(
    data: st.DataObject, dp_size: int, num_blocks: int, rows: int, per_input: int, uneven: Uneven, by_tokens: bool
) -> None:
    def column() -> list[int]:
        return data.draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows))

    try:
        shards = deal_rows(
            rows, dp_size, num_blocks, "a test", uneven, tokens=column() if by_tokens else None, groups=column()
        )
    except Refused:
        return
    answers = [[(row, i) for row in shard.row_numbers() for i in range(per_input)] for shard in shards]
    restored = [item for part, start, stop in runs_of(shards, per_input) for item in answers[part][start:stop]]
    assert restored == [(row, i) for row in range(rows) for i in range(per_input)]
    for shard in shards:
        of_ranges = [row for start, stop in shard.ranges() for row in range(start, stop)]
        assert len(of_ranges) == len(shard.row_numbers()) == len(shard.copies()) == sum(shard.sizes)
        assert all(number in (row, -1) for row, number in zip(of_ranges, shard.row_numbers(), strict=True))
        assert [copy < 0 for copy in shard.copies()] == [number >= 0 for number in shard.row_numbers()]


def test_copies_of_a_group_are_told_apart() -> None:
    shards = deal_rows(2, 3, 1, "a test", "pad", groups=[7, 7])
    assert [shard.row_numbers() for shard in shards] == [[0, 1], [-1, -1], [-1, -1]]
    twice = Shard((Block(((0, 2),), (((0, 2),), ((0, 2),))),))
    assert twice.copies() == [-1, -1, 0, 0, 1, 1]
    assert twice.sizes == (6,)


@given(st.lists(st.integers(0, 100), max_size=80), st.integers(1, 9))
def test_parts_hold_each_place_once_and_counts_differ_by_at_most_one(weights: list[int], num_parts: int) -> None:
    parts = balanced_parts(weights, num_parts)
    assert len(parts) == num_parts
    assert sorted(place for part in parts for place in part) == list(range(len(weights)))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def imbalance(shards: Sequence[Shard], tokens: Sequence[int], block: int) -> float:
    """Tokens of the rank that has most in a block, over the mean."""
    sums = [sum(tokens[row] for row in rows_of(shard.blocks[block])) for shard in shards]
    return max(sums) * len(sums) / sum(sums)


@pytest.mark.parametrize(("dp_size", "per_rank", "num_blocks"), [(2, 8, 4), (4, 16, 4), (8, 16, 4), (64, 32, 2)])
@pytest.mark.parametrize("groups_of", [1, 2])
def test_long_tailed_lengths_are_balanced_below_five_percent_where_the_longest_row_lets_them(
    dp_size: int, per_rank: int, num_blocks: int, groups_of: int
) -> None:
    feasible, by_number = 0, []
    for seed in range(6):
        draw: Any = random.Random(seed)
        rows = dp_size * per_rank * num_blocks * groups_of
        tokens = [min(16384, 1 + int(draw.lognormvariate(6.5, 1.0))) for _ in range(rows)]
        groups = [row // groups_of for row in range(rows)]
        shards = deal_rows(rows, dp_size, num_blocks, "a test", tokens=tokens, groups=groups)
        by_rows = deal_rows(rows, dp_size, num_blocks, "a test", groups=groups)
        for block in range(num_blocks):
            weights = sorted(
                sum(tokens[i] for i in members)
                for members in rows_of_groups(groups).values()
                if members[0] // (rows // num_blocks) == block
            )
            # Ranks have equal counts: nobody can do better than the longest row beside the shortest ones.
            bound = (weights[-1] + sum(weights[: per_rank - 1])) * dp_size / sum(weights)
            feasible += bound < 1.03
            assert imbalance(shards, tokens, block) < max(1.05, bound * 1.02)
            by_number.append(imbalance(by_rows, tokens, block))
    assert feasible > 5
    assert max(by_number) > 1.2


def test_too_few_rows_are_refused_with_how_many_it_takes() -> None:
    with pytest.raises(Refused, match="at least 4"):
        deal_rows(3, 4, 1, "a test", "ragged")
    with pytest.raises(Refused, match="at least 3"):
        deal_rows(2, 4, 3, "a test", "pad")
    with pytest.raises(Refused, match="sizes: 8, 12"):
        deal_rows(10, 4, 1, "a test")
    with pytest.raises(Refused, match="at least one block"):
        deal_rows(10, 4, 0, "a test")


def test_groups_are_counted_whole() -> None:
    groups = [0, 1, 0, 1, 2, 2]  # three groups of two rows
    with pytest.raises(Refused, match="3 groups cannot be dealt evenly"):
        deal_rows(6, 2, 1, "a test", groups=groups)
    assert [s.row_numbers() for s in deal_rows(6, 3, 1, "a test", groups=groups)] == [[0, 2], [1, 3], [4, 5]]
    padded = deal_rows(6, 2, 1, "a test", "pad", groups=groups)
    assert [shard.row_numbers() for shard in padded] == [[0, 2, 1, 3], [4, 5, -1, -1]]
    assert padded[1].ranges() == [(4, 6), (4, 6)]
