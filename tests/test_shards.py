"""How rows are dealt: each exactly once, and sizes that the policy promises."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core._rows.shards import Uneven, deal_rows
from core.errors import Refused


def sizes(rows: int, dp_size: int, uneven: Uneven, num_blocks: int = 1) -> list[int]:
    return [sum(shard.sizes) for shard in deal_rows(rows, dp_size, num_blocks, "a test", uneven)]


@pytest.mark.parametrize(
    ("rows", "dp_size", "wanted"),
    [(10, 3, [4, 3, 3]), (146, 4, [37, 37, 36, 36]), (9, 4, [3, 2, 2, 2]), (124, 15, [9] * 4 + [8] * 11)],
)
def test_ragged_shards_differ_by_at_most_one_and_the_first_get_more(rows: int, dp_size: int, wanted: list[int]) -> None:
    assert sizes(rows, dp_size, "ragged") == wanted


def test_padded_shards_are_even_and_filler_comes_last() -> None:
    shards = deal_rows(10, 4, 1, "a test", "pad")
    assert [shard.row_numbers() for shard in shards] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, -1, -1]]
    assert [shard.row_numbers() for shard in deal_rows(2, 4, 1, "a test", "pad")] == [[0], [1], [-1], [-1]]


def test_every_mini_batch_has_real_rows_when_it_is_padded() -> None:
    shards = deal_rows(5, 2, 4, "a test", "pad")
    assert [shard.row_numbers() for shard in shards] == [[0, 2, 3, 4], [1, -1, -1, -1]]


counts = st.integers(1, 6)


@given(counts, counts, st.integers(1, 90), st.sampled_from(["error", "pad", "ragged"]))
def test_rows_are_dealt_each_once_and_as_the_policy_promises(
    dp_size: int, num_blocks: int, rows: int, uneven: Uneven
) -> None:
    try:
        shards = deal_rows(rows, dp_size, num_blocks, "a test", uneven)
    except Refused:
        assert uneven == "error" or rows < dp_size * num_blocks
        return
    numbers = [row for shard in shards for row in shard.row_numbers()]
    assert sorted(row for row in numbers if row >= 0) == list(range(rows))
    assert {len(shard.blocks) for shard in shards} == {num_blocks}
    per_shard = [sum(shard.sizes) for shard in shards]
    assert max(per_shard) - min(per_shard) <= (uneven == "ragged")
    for block in zip(*(shard.blocks for shard in shards), strict=True):
        runs = [stop - start + filler for start, stop, filler in block]
        assert max(runs) - min(runs) <= (uneven == "ragged")
        assert [row for start, stop, _ in block for row in range(start, stop)] == list(range(block[0][0], block[-1][1]))
        assert uneven == "pad" or not any(filler for _, _, filler in block)
    real = [sum(stop - start for start, stop, _ in block) for block in zip(*(s.blocks for s in shards), strict=True)]
    assert max(real) - min(real) <= 1


def test_too_few_rows_are_refused_with_how_many_it_takes() -> None:
    with pytest.raises(Refused, match="at least 4"):
        deal_rows(3, 4, 1, "a test", "ragged")
    with pytest.raises(Refused, match="at least 3"):
        deal_rows(2, 4, 3, "a test", "pad")
    with pytest.raises(Refused, match="sizes: 8, 12"):
        deal_rows(10, 4, 1, "a test")
    with pytest.raises(Refused, match="at least one block"):
        deal_rows(10, 4, 0, "a test")
