"""Splitting and joining batches: the round trip is the identity for every form of column."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict

from core._rows.wire import decode, encode
from core.batch import (
    concat,
    is_jagged,
    jagged_from,
    metadata,
    num_rows,
    object_column,
    objects,
    row_lengths,
    select,
    take,
    to_jagged,
    to_padded,
    with_metadata,
)
from core.errors import Refused


def make_batch(lengths: list[int], seed: int = 0) -> TensorDict:
    """Every form of column over rows of the given lengths."""
    random = torch.Generator().manual_seed(seed)
    rows, tokens = len(lengths), sum(lengths)
    ids: Any = jagged_from(torch.randint(0, 99, (tokens,), generator=random), torch.tensor(lengths, dtype=torch.int64))
    batch = TensorDict(
        {
            "input_ids": ids,
            "log_probs": torch.nested.nested_tensor_from_jagged(torch.rand(tokens, generator=random), ids.offsets()),
            "half": torch.rand(rows, 31, generator=random).bfloat16(),
            "strided": torch.rand(41, rows, generator=random).t(),
            "tags": object_column([{"row": i} if i % 2 else [i, i] for i in range(rows)]),
            "inner": TensorDict({"flag": torch.arange(rows) % 2 == 0}, batch_size=[rows]),
        },
        batch_size=[rows],
    )
    return with_metadata(batch, temperature=0.7)


def same(a: Any, b: Any) -> bool:
    if num_rows(a) != num_rows(b) or set(a.keys()) != set(b.keys()):
        return False
    for name in a.keys():  # noqa: SIM118
        x, y = a.get(name), b.get(name)
        if name == "inner":
            if not same(x, y):
                return False
        elif name == "tags":
            if objects(x) != objects(y):
                return False
        elif name == "temperature":
            if x.data != y.data:
                return False
        elif is_jagged(x):
            if not (torch.equal(x.values(), y.values()) and torch.equal(x.offsets(), y.offsets())):
                return False
        elif x.dtype != y.dtype or not torch.equal(x, y):
            return False
    return True


row_sets = st.lists(st.integers(0, 5), min_size=1, max_size=9)


@given(row_sets, st.data())
@settings(max_examples=60, deadline=None)
def test_cutting_at_any_rows_and_joining_again_is_the_identity(lengths: list[int], data: st.DataObject) -> None:
    batch = make_batch(lengths)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(lengths)), max_size=4)))
    edges = [0, *cuts, len(lengths)]
    parts = [take(batch, [(a, b)]) for a, b in pairwise(edges)]
    assert same(concat(parts), batch)


@given(row_sets, st.data())
@settings(max_examples=60, deadline=None)
def test_selecting_rows_gives_just_these_and_undoes_a_permutation(lengths: list[int], data: st.DataObject) -> None:
    batch = make_batch(lengths)
    order = torch.tensor(data.draw(st.permutations(range(len(lengths)))))
    shuffled = select(batch, order)
    for place, row in enumerate(order.tolist()):
        assert same(take(shuffled, [(place, place + 1)]), take(batch, [(row, row + 1)]))
    assert same(select(shuffled, torch.argsort(order)), batch)


@given(row_sets)
@settings(max_examples=40, deadline=None)
def test_crossing_the_wire_changes_nothing(lengths: list[int]) -> None:
    batch = make_batch(lengths)
    assert same(decode(copy.deepcopy(encode(batch))), batch)


@given(row_sets, st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_padding_and_its_removal_is_the_identity(lengths: list[int], multiple: int) -> None:
    batch = make_batch(lengths)
    padded = to_padded(batch, multiple=multiple)
    assert padded["input_ids"].shape[1] % multiple == 0
    assert padded["attention_mask"].sum(1).tolist() == lengths == row_lengths(padded).tolist()
    assert (padded["log_probs"][~padded["attention_mask"]] == 0).all()
    assert same(to_jagged(padded), batch)


def test_columns_that_shared_their_offsets_still_can_be_computed_with_together() -> None:
    batch = make_batch([3, 1, 2])
    for again in (
        take(batch, [(1, 3)]),
        select(batch, torch.tensor([2, 0])),
        concat([batch, batch]),
        decode(encode(batch)),
    ):
        assert (again["log_probs"] * again["input_ids"]).shape[0] == num_rows(again)


def test_a_view_on_the_wire_carries_only_its_own_elements() -> None:
    view = torch.zeros(1000, 1000)[:2]
    assert encode(view).array.nbytes == 2 * 1000 * 4


def test_what_arrives_is_private() -> None:
    batch = make_batch([2, 2])
    wire = encode(batch)
    first, second = decode(wire), decode(wire)
    first["half"].zero_()
    first["input_ids"].values().zero_()
    assert same(second, batch)


def test_tensors_and_batches_inside_containers_cross_the_wire_and_other_objects_pass() -> None:
    value = {
        "a": (torch.ones(2), [make_batch([1])]),
        "b": None,
        "c": {1, 2},
        "d": torch.tensor(1.5, dtype=torch.bfloat16),
    }
    back = decode(encode(value))
    assert torch.equal(back["a"][0], torch.ones(2))
    assert same(back["a"][1][0], make_batch([1]))
    assert back["d"].item() == 1.5
    assert back["d"].shape == ()
    assert (back["b"], back["c"]) == (None, {1, 2})


def test_batches_that_differ_cannot_be_joined_and_the_error_says_how() -> None:
    batch = make_batch([1, 2])
    with pytest.raises(Refused, match="different columns"):
        concat([batch, batch.exclude("half")])
    with pytest.raises(Refused, match="'half'") as refusal:
        concat([batch, batch.clone().update({"half": torch.zeros(2, 4, dtype=torch.bfloat16)})])
    assert "jagged" in refusal.value.mend
    with pytest.raises(Refused, match="'temperature' differs"):
        concat([batch, with_metadata(batch.clone(), temperature=0.8)])
    with pytest.raises(Refused, match="no batch"):
        concat([])


def test_metadata_is_read_by_name_with_a_default() -> None:
    batch = make_batch([1])
    assert metadata(batch, "temperature") == 0.7
    assert metadata(batch, "absent", 3) == 3


def test_writing_one_row_of_an_object_column_changes_no_other() -> None:
    column = decode(encode(TensorDict({"word": object_column(["a", "a", "b"])}, batch_size=[3])))
    column[0] = TensorDict({"word": NonTensorData("c")}, batch_size=[])
    assert objects(column.get("word")) == ["c", "a", "b"]


def test_masks_of_tokenizers_and_rows_without_tokens_are_taken() -> None:
    padded = TensorDict(
        {"input_ids": torch.arange(6).view(2, 3), "attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]])}, [2]
    )
    assert to_jagged(padded)["input_ids"].values().tolist() == [0, 1, 3]
    empty: Any = jagged_from(torch.zeros(0, dtype=torch.int64), torch.tensor([0, 0]))
    assert to_padded(TensorDict({"input_ids": empty}, batch_size=[2]))["attention_mask"].tolist() == [[False], [False]]


def test_a_batch_whose_lengths_cannot_be_told_is_refused() -> None:
    with pytest.raises(Refused, match="lengths"):
        row_lengths(TensorDict({"x": torch.zeros(2)}, batch_size=[2]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn])
def test_large_columns_of_any_dtype_are_joined_as_small_ones_are(dtype: torch.dtype) -> None:
    parts = [(torch.rand(rows, 2_000_000, generator=torch.Generator().manual_seed(rows)) > 0.5) for rows in (1, 2)]
    columns = [part.float().to(dtype) for part in parts]
    whole = concat([TensorDict({"x": column}, batch_size=[len(column)]) for column in columns])
    assert whole["x"].dtype == dtype
    assert torch.equal(whole["x"].float(), torch.cat(parts).float())
