"""Rows dealt by tokens and rows that belong together, through groups in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from core._rows.rows import Rows
from core._rows.shards import Shard, deal_rows
from core._rows.stored import StoredPart, StoredRows
from core.batch import jagged_from, row_groups, row_lengths, to_padded
from core.dispatch import on_mesh, register
from core.errors import Refused
from core.group import RayClassWithInitArgs
from core.transport.local import LocalWorkerGroup
from core.worker import Worker
from tests.support.workers import mesh_of


class Dealt(Worker):
    """Tells which rows it got."""

    def __init__(self, dp_ranks: Any) -> None:
        self.add_mesh("m", mesh_of(self.rank, dp_ranks, list(range(len(dp_ranks)))))

    @register(on_mesh("m"), deal_by="tokens", num_blocks="blocks", columns=["input_ids", "attention_mask", "x"])
    def by_tokens(self, batch: TensorDict, blocks: int = 1) -> TensorDict:
        return self._back(batch)

    @register(on_mesh("m"), deal_by="tokens", uneven="pad", num_blocks="blocks")
    def padded(self, batch: TensorDict, blocks: int = 1) -> TensorDict:
        return self._back(batch)

    @register(on_mesh("m"), uneven="ragged")
    def by_rows(self, batch: TensorDict) -> TensorDict:
        return self._back(batch)

    @register(on_mesh("m"), rows_per_input=None)
    def some(self, batch: TensorDict) -> TensorDict:
        return batch

    def _back(self, batch: TensorDict) -> TensorDict:
        assert self.shard is not None
        rows = len(batch)
        batch["rank"] = torch.full((rows,), self.rank)
        batch["load"] = torch.full((rows,), int(row_lengths(batch).sum()))
        batch["row"] = torch.tensor(self.shard.row_numbers())
        for group, members in (row_groups(batch) or {}).items():  # groups are whole, and filler is groups of its own
            real = {self.shard.row_numbers()[row] >= 0 for row in members}
            assert len(real) == 1, group
            assert len(members) == int(batch["size"][members[0]]) if "size" in batch.keys() else True  # noqa: SIM118
        return batch


def group_of(dp_size: int) -> LocalWorkerGroup:
    return LocalWorkerGroup(RayClassWithInitArgs(Dealt, list(range(dp_size))), world_size=dp_size)


def batch_of(lengths: list[int], groups: list[int] | None = None) -> TensorDict:
    tokens = torch.tensor(lengths)
    batch = TensorDict(
        {"input_ids": jagged_from(torch.arange(int(tokens.sum())), tokens), "x": torch.arange(len(lengths))},
        batch_size=[len(lengths)],
    )
    if groups is not None:
        batch["group_id"] = torch.tensor(groups)
        batch["size"] = torch.tensor([groups.count(group) for group in groups])
    return batch


def test_dp_ranks_carry_like_numbers_of_tokens_and_answers_come_in_the_drivers_order() -> None:
    batch = batch_of([90, 80, 70, 60, 1, 2, 3, 4])
    with group_of(2) as group:
        for given_batch in (batch, to_padded(batch)):
            answer = group.by_tokens(given_batch)
            assert answer["row"].tolist() == answer["x"].tolist() == list(range(8))
            assert max(answer["load"].tolist()) <= 157  # of 310
            assert answer["rank"].bincount().tolist() == [4, 4]
        assert torch.equal(group.by_tokens(batch)["input_ids"].values(), batch["input_ids"].values())
        assert max(group.by_rows(batch)["load"].tolist()) == 300


class Store:
    """Values by handle, as a transport's store; counts what is read."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.reads = 0

    def put(self, value: Any) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def fetch(self, handles: Any) -> list[Any]:
        self.reads += len(handles)
        return [self.values[handle] for handle in handles]

    def keep(self, batch: TensorDict, shards: tuple[Shard, ...]) -> StoredRows:
        """The batch as dp ranks would have left it."""
        rows = Rows.of(batch)
        parts = [
            StoredPart.of(rows.shard(shard, with_weights=False).on_wire(), rank, self.put)
            for rank, shard in enumerate(shards)
        ]
        return StoredPart.joined(parts).restored(shards, 1).result(self, "a test")


@pytest.mark.parametrize("padded", [False, True])
def test_rows_that_lie_with_workers_tell_tokens_and_groups_without_being_fetched(padded: bool) -> None:
    lengths, groups = [9, 1, 7, 30, 2, 2, 5, 40] * 5, [5, 1, 5, 1, 2, 2, 9, 9] * 5
    batch = batch_of(lengths, groups)
    batch["wide"] = torch.rand(40, 9000)  # above what travels with the answer
    batch = to_padded(batch) if padded else batch
    store = Store()
    stored = store.keep(batch, deal_rows(40, 3, 1, "a test", "pad", tokens=lengths))
    assert stored.row_tokens() == lengths
    assert stored.row_groups() == groups
    assert stored.only(lambda name: name != "group_id").row_groups() is None
    assert store.reads == 0
    shards = deal_rows(40, 3, 1, "a test", "pad", tokens=lengths, groups=groups)
    for shard in shards:
        lies, here = stored.shard(shard, with_weights=True), Rows.of(batch).shard(shard, with_weights=True).batch()
        fetched = lies.batch(store.fetch)
        for name in ("x", "wide", "row_weight", "group_id"):
            assert torch.equal(fetched[name], here[name])
        assert row_lengths(fetched).tolist() == row_lengths(here).tolist()
        real = [row for row in shard.row_numbers() if row >= 0]
        assert fetched["x"][fetched["row_weight"] > 0].tolist() == real
        # Filler is no part of the groups that it is copied from.
        assert not set(fetched["group_id"][fetched["row_weight"] == 0].tolist()) & {groups[row] for row in real}


def test_stored_rows_with_a_group_id_of_another_form_are_refused_when_they_are_dealt() -> None:
    batch = batch_of([1, 2]).set("group_id", torch.zeros(2))
    stored = Store().keep(batch, deal_rows(2, 2, 1, "a test"))
    with pytest.raises(Refused, match=r"int64 \(rows,\)"):
        stored.row_groups()


@given(st.data(), st.integers(1, 4), st.integers(1, 3), st.booleans())
@settings(max_examples=60, deadline=None)
def test_whatever_the_lengths_and_groups_a_batch_comes_back_as_it_went(
    data: st.DataObject, dp_size: int, blocks: int, grouped: bool
) -> None:
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=3, max_size=14))
    rows = len(lengths)
    groups = data.draw(st.lists(st.integers(-2, 4), min_size=rows, max_size=rows)) if grouped else None
    batch = batch_of(lengths, groups)
    with group_of(dp_size) as group:
        if len(set(groups or range(rows))) < blocks:
            with pytest.raises(Refused, match="too small"):
                group.padded(batch, blocks)
            return
        answer = group.padded(batch, blocks)
    assert answer["row"].tolist() == answer["x"].tolist() == list(range(rows))
    assert torch.equal(answer["input_ids"].values(), batch["input_ids"].values())
    assert "row_weight" not in answer.keys()  # noqa: SIM118
    if groups is not None:
        assert answer["group_id"].tolist() == groups


def test_what_cannot_be_dealt_so_is_refused_before_anything_runs() -> None:
    with group_of(2) as group:
        with pytest.raises(Refused, match="no column tells how many"):
            group.by_tokens(TensorDict({"x": torch.arange(4)}, batch_size=[4]))
        with pytest.raises(Refused, match=r"torch.int64 \(rows,\)"):
            group.by_rows(batch_of([1, 2, 3, 4]).set("group_id", torch.zeros(4)))
        with pytest.raises(Refused, match="only where their number is known"):
            group.some(batch_of([1, 2, 3, 4], [0, 1, 0, 1]))
        assert len(group.some(batch_of([1, 2, 3, 4], [0, 0, 1, 1]))) == 4
        with pytest.raises(Refused, match="3 groups cannot be dealt evenly"):
            group.by_tokens(batch_of([1] * 6, [0, 0, 1, 1, 2, 2]))
    with pytest.raises(Refused, match="not dealt by 'weight'"):
        register(on_mesh("m"), deal_by="weight")  # type: ignore[call-overload]
    with pytest.raises(Refused, match="rows_per_input"):
        register(on_mesh("m"), deal_by="tokens", rows_per_input=None)
