"""What a dispatch mode does with arguments, rows and answers, seen on a group of ranks in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import attrs
import pytest
import torch
from tensordict import TensorDict

from core.batch import jagged, objects
from core.dispatch import Dispatch, DispatchMode, PerRank, register
from core.errors import Refused
from core.group import RayClassWithInitArgs
from core.mesh import MeshLayout, RankMesh
from core.transport.local import LocalWorkerGroup
from core.worker import Worker
from sdk.conformance.base import Conformance, gate

Test = TypeVar("Test", bound=Callable[..., Any])


def of_rows(test: Test) -> Test:
    """A test of a mode that deals batches by row."""
    return gate(lambda suite: "" if getattr(suite, "deals_rows", False) else "it deals no rows")(test)


@attrs.frozen
class Given:
    """What reached a rank in the last call."""

    rows: list[int] | None  # values of column "x"; None where there was no batch
    values: tuple[Any, ...]


def probe(mode: DispatchMode) -> type[Worker]:
    """A worker whose methods are dispatched by the mode and note what reached them.

    The ranks of a mode's mesh lie in pairs that share rows; the second of each pair is not collected and answers
    wrongly.
    """

    class Probe(Worker):
        def __init__(self) -> None:
            self.given: Given | None = None
            self.is_wrong = False
            if mode.mesh is not None:
                tp = 2 if self.world_size % 2 == 0 else 1
                layout = MeshLayout.of(dp=self.world_size // tp, tp=tp)
                mesh = RankMesh(layout, self.rank, layout.route(("dp",), {"tp": 0}))
                self.add_mesh(mode.mesh, mesh)
                self.is_wrong = not mesh.is_collect

        @register(mode)
        def triple(self, batch: Any, *values: Any, **keywords: Any) -> Any:
            """Triples x in place and adds a column."""
            self.given = Given(batch["x"].tolist(), (*values, *keywords.values()))
            batch["x"].mul_(3)
            batch["rank"] = batch["x"].new_full((len(batch),), self.rank)
            return batch.exclude("rank").apply(torch.zeros_like) if self.is_wrong else batch

        @register(mode)
        def note(self, *values: Any, **keywords: Any) -> Any:
            """Notes its values, and changes those that can be changed."""
            self.given = Given(None, tuple(list(value) if isinstance(value, list) else value for value in values))
            for value in values:
                if isinstance(value, list):
                    value.append(self.rank)
            return self.rank

        @register(Dispatch.ONE_TO_ALL)
        def last(self) -> Given | None:
            last_call, self.given = self.given, None
            return last_call

    return Probe


def batch_of(num_rows: int) -> TensorDict:
    """Rows that can be told from each other, in columns of every form."""
    tokens = jagged([torch.arange(row % 3 + 1) + 10 * row for row in range(num_rows)])
    return TensorDict({"x": torch.arange(num_rows) + 1, "tokens": tokens}, batch_size=[num_rows])


class DispatchSuite(Conformance):
    """See DispatchModeConformance."""

    kind = "dispatch_mode"
    worlds = (1, 2, 4)
    deals_rows: ClassVar[bool] = True

    @classmethod
    def mode(cls) -> Any:
        return cls.entry().load("factory")

    def group(self, world_size: int) -> Any:
        return LocalWorkerGroup(RayClassWithInitArgs(probe(self.mode())), world_size=world_size)

    def test_its_factory_is_a_dispatch_mode(self) -> None:
        mode = self.mode()
        assert isinstance(mode, DispatchMode), f"the manifest's factory is {mode!r}"
        assert mode.name, "errors and logs name the mode"

    @of_rows
    def test_the_answer_has_the_callers_rows_in_the_callers_order(self, world_size: int) -> None:
        """Of a number that divides over the ranks, and of others, which the mode may refuse."""
        for num_rows in (4 * world_size, 4 * world_size + 1, 1):
            try:
                answer = self.group(world_size).triple(batch_of(num_rows))
            except Refused:
                assert num_rows != 4 * world_size
                continue
            assert answer["x"].tolist() == [3 * (row + 1) for row in range(num_rows)], f"{num_rows} rows"
            want = list(batch_of(num_rows)["tokens"].unbind())
            for have, row in zip(answer["tokens"].unbind(), want, strict=True):
                assert torch.equal(have, row), "a jagged column has other rows"
            assert answer["rank"].shape == (num_rows,), "a column that the workers added does not arrive"

    @of_rows
    def test_every_row_reaches_the_ranks_that_share_it_once(self, world_size: int) -> None:
        """No rank works for nothing: ranks have the same rows, or none in common."""
        group = self.group(world_size)
        group.triple(batch_of(4 * world_size))
        rows_by_rank = [tuple(each.rows) for each in group.last() if each is not None]
        parts = set(rows_by_rank)
        rows = sorted(row for part in parts for row in part)
        assert rows == list(range(1, 4 * world_size + 1)), f"rows by rank: {rows_by_rank}"

    @of_rows
    def test_the_callers_batch_stays_as_it_was(self, world_size: int) -> None:
        batch = batch_of(4 * world_size)
        self.group(world_size).triple(batch)
        assert batch["x"].tolist() == list(range(1, 4 * world_size + 1))
        assert sorted(batch.keys()) == ["tokens", "x"]

    @of_rows
    def test_positional_and_keyword_arguments_are_dealt_alike(self, world_size: int) -> None:
        group, batch = self.group(world_size), batch_of(4 * world_size)
        group.triple(batch, 7)
        positional = group.last()
        group.triple(batch=batch, value=7)
        assert group.last() == positional

    @of_rows
    def test_objects_of_rows_go_with_their_rows(self, world_size: int) -> None:
        from core.batch import object_column

        batch = batch_of(4 * world_size)
        batch["name"] = object_column([f"row {row}" for row in range(4 * world_size)])
        answer = self.group(world_size).triple(batch)
        assert objects(answer.get("name")) == [f"row {row}" for row in range(4 * world_size)]

    def test_what_is_no_batch_reaches_every_rank_that_runs(self, world_size: int) -> None:
        group = self.group(world_size)
        group.note("word", 3)
        values = [each.values for each in group.last() if each is not None]
        assert values
        assert set(values) == {("word", 3)}

    def test_a_per_rank_argument_gives_each_rank_its_own_value(self, world_size: int) -> None:
        group = self.group(world_size)
        group.note(PerRank([f"of {rank}" for rank in range(world_size)]))
        for rank, each in enumerate(group.last()):
            if each is not None:
                assert each.values == (f"of {rank}",), f"rank {rank} has {each.values}"

    def test_a_per_rank_argument_of_another_length_is_refused(self, world_size: int) -> None:
        group = self.group(world_size)
        with pytest.raises(Refused):
            group.note(PerRank([0] * (world_size + 1)))
        group.note(0)  # the group is healthy

    def test_what_a_rank_does_to_an_argument_no_other_rank_and_no_caller_sees(self, world_size: int) -> None:
        group, argument = self.group(world_size), ["given"]
        for _ in range(2):
            group.note(argument)
            assert argument == ["given"]
            assert {tuple(each.values[0]) for each in group.last() if each is not None} == {("given",)}
