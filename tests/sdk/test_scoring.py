"""Scores: texts asked for in parts of bounded size, answers built from lists, and versions that change in the midst."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from core.batch import flat, jagged
from core.config import RolloutConfig
from core.errors import ManymeshError, Refused
from core.group import RayClassWithInitArgs
from core.mesh import MeshLayout, RankMesh
from core.rollout import Rollout, ScoringRollout
from core.transport.local import LocalWorkerGroup
from manymesh.parts.scoring import RowScore, parts, read_sequences, scores
from manymesh.parts.server_rollout import ServerRollout
from manymesh.workers.rollout import GeneratingWorker


def sequences(*rows: Sequence[int]) -> TensorDict:
    batch = TensorDict({}, batch_size=[len(rows)])
    return batch.set("input_ids", jagged([torch.tensor(list(row), dtype=torch.int64) for row in rows]))


def read(*rows: Sequence[int], longest: int | None = None) -> torch.Tensor:
    return read_sequences(sequences(*rows), vocab_size=64, longest=longest, temperature=1.0, top_k=0)


@given(st.lists(st.integers(1, 40)), st.integers(0, 9), st.integers(1, 200))
def test_parts_are_all_rows_in_order_and_none_asks_for_more_than_it_may(
    lengths: list[int], top_k: int, values: int
) -> None:
    rows = [[number] * length for number, length in enumerate(lengths)]
    runs = list(parts(rows, top_k, values))
    assert [row for run in runs for row in run] == rows
    assert all(len(run) == 1 or sum(map(len, run)) * (1 + top_k) <= values for run in runs)
    assert all(run for run in runs)


def test_scores_of_lists_are_columns_aligned_with_their_tokens() -> None:
    ids = read([5, 6, 7], [8], [9, 10])
    rows: list[RowScore] = [
        ([-1.0, -2.0], [[(6, -1.0), (3, -4.0)], [(1, -0.5), (7, -2.0)]]),
        ([], []),
        ([-3.0], [[(2, -0.1), (4, -0.2)]]),
    ]
    out = scores(ids, rows, 2, "a test")
    assert [row.tolist() for row in out["log_probs"].unbind()] == [[0, -1, -2], [0], [0, -3]]
    assert [row.tolist() for row in out["top_ids"].unbind()] == [[[0, 0], [6, 3], [1, 7]], [[0, 0]], [[0, 0], [2, 4]]]
    assert out["top_log_probs"].unbind()[2].tolist() == [[0, 0], [pytest.approx(-0.1), pytest.approx(-0.2)]]
    assert all(flat(out[name])[1] is flat(ids)[1] for name in ("log_probs", "top_ids", "top_log_probs"))
    assert set(scores(ids, rows, 0, "a test").keys()) == {"log_probs"}


def test_scores_that_lack_tokens_or_are_not_numbers_are_errors() -> None:
    ids = read([5, 6, 7])
    with pytest.raises(ManymeshError, match=r"lack tokens[\s\S]*2 values"):
        scores(ids, [([-1.0], [])], 0, "a test")
    with pytest.raises(ManymeshError, match=r"not finite[\s\S]*weight version 3"):
        scores(ids, [([-1.0, float("nan")], [])], 0, "weight version 3")


def test_a_sequence_that_is_too_long_or_empty_is_named_with_its_row() -> None:
    with pytest.raises(Refused, match=r"sequence 1 is longer[\s\S]*at most 2"):
        read([5, 6], [5, 6, 7], longest=2)
    with pytest.raises(Refused, match=r"rows of input_ids are empty[\s\S]*\[1\]"):
        read([5, 6], [])


def mesh(rank: int, world_size: int) -> RankMesh:
    layout = MeshLayout.of(dp=world_size)
    return RankMesh(layout, rank, layout.route(("dp",)))


class Doubles(ServerRollout):
    """Its score of a token is the token times the version of its weights. The first call of its engine meets an update.

    Attributes:
        calls: of its engine.
    """

    def __init__(self) -> None:
        super().__init__(RolloutConfig("none"), "cpu", mesh(0, 1))
        self.calls = 0
        self.initialize()

    def _start(self) -> Any:
        return SimpleNamespace(call=lambda answer: answer, scores=self._scores), {}

    def _requests(self, *args: Any) -> list[Any]:
        return []

    def _score_limits(self) -> tuple[int, int]:
        return 64, 512

    def _scores(self, rows: Sequence[Sequence[int]], temperature: float, top_k: int) -> list[RowScore]:
        self.calls += 1
        version = self.weight_version or 0
        if self.calls == 1:
            self._ready().begin(version + 3, ())
            self._ready().finish()
        return [([float(token * version) for token in row[1:]], [[]] * (len(row) - 1)) for row in rows]


def test_rows_that_met_a_weight_update_are_scored_again_so_that_all_are_of_one_version() -> None:
    rollout = Doubles()
    out = rollout.score(sequences([5, 6], [7, 8, 9]))
    assert [row.tolist() for row in out["log_probs"].unbind()] == [[0, 18], [0, 24, 27]]
    assert rollout.calls == 2
    rollout._asked_to_pause = True
    with pytest.raises(Refused, match="score would wait for ever"):
        rollout.score(sequences([5]))
    rollout._asked_to_pause = False
    rollout._ready().begin(4, ())
    with pytest.raises(Refused, match="no valid weights"):
        rollout.score(sequences([5]))


class TokensAsScores:
    """A rollout that scores each token as its number."""

    def score(self, batch: TensorDict, *, temperature: float = 1.0, top_k: int = 0) -> TensorDict:
        assert set(batch.keys()) == {"input_ids"}
        ids = read_sequences(batch, vocab_size=64, longest=None, temperature=temperature, top_k=top_k)
        rows: list[RowScore] = [
            ([float(token) for token in row[1:].tolist()], [[(int(token), temperature)] * top_k for token in row[1:]])
            for row in ids.unbind()
        ]
        return scores(ids, rows, top_k, "a test")


for _name in dir(Rollout):
    if not _name.startswith("_") and not hasattr(TokensAsScores, _name):
        setattr(TokensAsScores, _name, lambda self: None)


class Holder(GeneratingWorker):
    def __init__(self, rollout: Any) -> None:
        self.rollout = rollout
        self.add_mesh("rollout", mesh(self.rank, self.world_size))


def test_a_worker_scores_rows_of_any_length_on_two_ranks_in_the_callers_order() -> None:
    assert isinstance(TokensAsScores(), ScoringRollout)
    group: Any = LocalWorkerGroup(RayClassWithInitArgs(Holder, TokensAsScores()), world_size=2)
    rows = [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14]]
    out = group.score_sequences(sequences(*rows).set("rewards", torch.ones(4)), temperature=0.5, top_k=2)
    assert [row.tolist() for row in out["log_probs"].unbind()] == [[0, 6, 7], [0], [0, 10], [0, 12, 13, 14]]
    assert out["top_ids"].unbind()[3].tolist() == [[0, 0], [12, 12], [13, 13], [14, 14]]
    assert float(out["top_log_probs"].unbind()[2][1, 0]) == 0.5


def test_a_rollout_that_does_not_score_is_refused_in_one_sentence() -> None:
    group: Any = LocalWorkerGroup(RayClassWithInitArgs(Holder, SimpleNamespace()))
    with pytest.raises(Refused, match="doesn't score") as raised:
        group.score_sequences(sequences([5, 6]))
    assert "'score'" in str(raised.value)
