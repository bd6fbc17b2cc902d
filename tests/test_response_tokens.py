"""The arithmetic that drivers write: one value a row over its response tokens, lengths, and flat token columns."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from core.batch import (
    jagged_from,
    nested,
    response_lengths,
    response_tokens,
    select,
    spread_over_response,
    to_padded,
    token_values,
)
from core.errors import Refused

# The response mask of each row: prompts, answers of several turns, and rows without a token.
masks = st.lists(st.lists(st.booleans(), max_size=6), min_size=1, max_size=6)


def batch_of(rows: list[list[bool]]) -> TensorDict:
    """Rows whose token i of row r has the id 100 * r + i, and an embedding of it."""
    offsets = torch.tensor([0, *accumulate(len(row) for row in rows)])
    ids = torch.tensor([100 * r + i for r, row in enumerate(rows) for i in range(len(row))], dtype=torch.int64)
    mask = torch.tensor([flag for row in rows for flag in row], dtype=torch.bool)
    columns = {"input_ids": ids, "response_mask": mask, "hidden": torch.stack([ids, -ids], 1)}
    return TensorDict({name: nested(values, offsets) for name, values in columns.items()}, batch_size=[len(rows)])


@settings(deadline=None)
@given(masks)
def test_response_tokens_and_lengths_are_those_of_each_row_s_mask(rows: list[list[bool]]) -> None:
    batch: Any = batch_of(rows)
    ids = [[100 * r + i for i, flag in enumerate(row) if flag] for r, row in enumerate(rows)]
    for form in (batch, to_padded(batch)):
        mask = form["response_mask"]
        lengths = response_lengths(mask)
        assert lengths.tolist() == [sum(row) for row in rows]
        by_row = response_tokens(form["input_ids"], mask).split(lengths.tolist())
        assert [row.tolist() for row in by_row] == ids
        hidden = response_tokens(form["hidden"], mask)
        assert hidden.tolist() == [[each, -each] for row in ids for each in row]


@settings(deadline=None)
@given(masks, st.data())
def test_a_value_of_each_row_stands_on_its_response_tokens_and_nowhere_else(
    rows: list[list[bool]], data: st.DataObject
) -> None:
    batch: Any = batch_of(rows)
    by_row = torch.tensor(data.draw(st.lists(st.integers(1, 99), min_size=len(rows), max_size=len(rows)))).float()
    want = [[float(value) * flag for flag in row] for value, row in zip(by_row.tolist(), rows, strict=True)]
    batch["advantages"] = spread_over_response(by_row, batch["response_mask"])
    assert [row.tolist() for row in batch["advantages"].unbind()] == want
    padded = to_padded(batch)
    assert torch.equal(spread_over_response(by_row, padded["response_mask"]), padded["advantages"])
    if any(rows):
        product = batch["advantages"] * batch["input_ids"]  # aligned: columns of one batch can be computed with
        assert torch.equal(token_values(product), token_values(batch["advantages"]) * token_values(batch["input_ids"]))


@settings(deadline=None)
@given(masks, st.data())
def test_what_is_taken_from_selected_rows_is_what_these_rows_have(rows: list[list[bool]], data: st.DataObject) -> None:
    batch: Any = batch_of(rows)
    index = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=6))
    few = select(batch, torch.tensor(index))
    lengths = response_lengths(batch["response_mask"])
    assert response_lengths(few["response_mask"]).tolist() == lengths[index].tolist()
    by_row = response_tokens(batch["input_ids"], batch["response_mask"]).split(lengths.tolist())
    want = torch.cat([by_row[i] for i in index])
    assert torch.equal(response_tokens(few["input_ids"], few["response_mask"]), want)


def test_token_values_are_a_view_and_of_a_narrowed_column_just_its_own_tokens() -> None:
    values = torch.arange(6.0)
    column: Any = jagged_from(values, torch.tensor([2, 0, 4]))
    assert token_values(column).data_ptr() == values.data_ptr()
    narrowed = torch.nested.narrow(
        torch.arange(8.0).reshape(2, 4), 1, torch.tensor([0, 1]), torch.tensor([1, 3]), layout=torch.jagged
    )
    assert token_values(narrowed).tolist() == [0, 5, 6, 7]


def test_columns_that_do_not_go_together_are_refused() -> None:
    batch: Any = batch_of([[True, False], [True]])
    padded = to_padded(batch)
    with pytest.raises(Refused, match="not aligned"):
        response_tokens(padded["input_ids"], batch["response_mask"])
    with pytest.raises(Refused, match="jagged with 2 tokens"):
        response_tokens(jagged_from(torch.ones(2), torch.tensor([1, 1])), batch["response_mask"])
    with pytest.raises(Refused, match="one value for each row"):
        spread_over_response(torch.ones(3), batch["response_mask"])
    with pytest.raises(Refused, match="to_jagged"):
        token_values(padded["input_ids"])
