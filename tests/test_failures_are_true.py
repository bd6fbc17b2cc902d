"""Refused means that nothing has run. Once workers run, no Refused reaches the driver but those that ranks raise."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict

from core.batch import jagged
from core.dispatch import Dispatch, DispatchMode, on_mesh, register
from core.errors import BadAnswer, DeadlineExceeded, ManymeshError, Refused, WorkerFailed
from core.group import RayClassWithInitArgs
from core.loss import Metric
from core.transport.local import LocalWorkerGroup
from core.worker import Worker
from tests.support.workers import mesh_of

# What a rank may answer, well or badly, by name.
ANSWERS = [
    *[
        "rows",
        "fewer_rows",
        "no_rows",
        "other_column",
        "other_width",
        "other_dtype",
        "other_metadata",
        "padded",
        "none",
    ],
    *["number", "metric", "other_metric", "same_metric", "dict", "other_keys", "tuple", "longer_tuple", "sparse"],
    *["nested_rows", "refusal", "error"],
]


def answer(kind: str, batch: TensorDict, rank: int) -> Any:
    num = len(batch)
    match kind:
        case "fewer_rows":
            return batch[: num - 1]
        case "no_rows":
            return batch[:0]
        case "other_column":
            return batch.clone().set("z", torch.zeros(num))
        case "other_width":
            return TensorDict({"x": torch.zeros(num, 3)}, batch_size=[num])
        case "other_dtype":
            return TensorDict({"x": batch["x"].double()}, batch_size=[num])
        case "other_metadata":
            return batch.clone().set("note", NonTensorData(rank, batch_size=[num]))
        case "padded":
            return TensorDict({"x": torch.zeros(num, rank + 1)}, batch_size=[num])
        case "none":
            return None
        case "number":
            return rank
        case "metric":
            return Metric(1.0, 2.0)
        case "other_metric":
            return Metric(1.0, how="max")
        case "same_metric":
            return Metric(float(rank), how="same")
        case "dict":
            return {"a": batch, "loss": Metric(1.0)}
        case "other_keys":
            return {"b": 1}
        case "tuple":
            return batch, 1
        case "longer_tuple":
            return batch, 1, 2
        case "sparse":
            return torch.eye(2).to_sparse()
        case "nested_rows":
            return {"rows": batch, "deep": ({"more": batch},)}
        case "refusal":
            raise Refused("a rank refuses")
        case "error":
            raise ValueError("a rank raises")
    return batch


def _collect_refuses(call: Any, answers: Any) -> Any:
    raise Refused("a plugin's collect that refuses")


class Answering(Worker):
    def __init__(self, world_size: int) -> None:
        ranks = list(range(world_size))
        self.add_mesh("m", mesh_of(self.rank, ranks, ranks))
        self.runs = 0

    def _answer(self, kinds: list[str], batch: TensorDict) -> Any:
        self.runs += 1
        return answer(kinds[self.rank], batch, self.rank)

    @register(on_mesh("m"), reducers={"n": "sum", "same": "same"})
    def routed(self, kinds: list[str], batch: TensorDict) -> Any:
        return self._answer(kinds, batch)

    @register(on_mesh("m"), uneven="pad", rows_per_input=2)
    def doubled(self, kinds: list[str], batch: TensorDict) -> Any:
        return self._answer(kinds, batch)

    @register(Dispatch.SAME_ON_ALL)
    def same(self, kinds: list[str], batch: TensorDict) -> Any:
        return self._answer(kinds, batch)

    @register(Dispatch.DP_COMPUTE_METRIC)
    def metrics(self, kinds: list[str], batch: TensorDict) -> Any:
        return self._answer(kinds, batch)

    @register(DispatchMode("OF_A_PLUGIN", Dispatch.ONE_TO_ALL.dispatch, _collect_refuses))
    def of_a_plugin(self, kinds: list[str], batch: TensorDict) -> Any:
        return self._answer(kinds, batch)

    @register()
    def num_runs(self) -> int:
        return self.runs


@given(
    st.sampled_from(["routed", "doubled", "same", "metrics", "of_a_plugin"]),
    st.lists(st.sampled_from(ANSWERS), min_size=2, max_size=3),
    st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_no_refusal_reaches_the_driver_once_the_workers_have_run(method: str, kinds: list[str], later: bool) -> None:
    world_size = len(kinds)
    rows = 3 * world_size
    batch = TensorDict(
        {"x": torch.arange(float(rows)), "t": jagged([torch.arange(i % 3) for i in range(rows)])}, [rows]
    )
    group = LocalWorkerGroup(RayClassWithInitArgs(Answering, world_size), world_size=world_size)
    call = getattr(group, method)
    error: ManymeshError | None = None
    try:
        call.later(kinds, batch).result() if later else call(kinds, batch)
    except ManymeshError as raised:
        error = raised
    assert not isinstance(error, Refused) or (error.message == "a rank refuses" and set(kinds) == {"refusal"})
    assert group.failed == isinstance(error, WorkerFailed)
    raising = bool({"refusal", "error"} & set(kinds))
    assert raising == isinstance(error, Refused | WorkerFailed)
    if not raising:
        assert group.num_runs() == [1] * world_size


def test_what_a_bad_answer_says_is_kept_when_it_comes_from_a_plugins_own_collect() -> None:
    group = LocalWorkerGroup(RayClassWithInitArgs(Answering, 1), world_size=1)
    batch = TensorDict({"x": torch.arange(2)}, batch_size=[2])
    with pytest.raises(BadAnswer, match="a plugin's collect that refuses") as error:
        group.of_a_plugin(["rows"], batch)
    assert isinstance(error.value.__cause__, Refused)


@pytest.mark.parametrize(
    "error",
    [
        Refused("a request", have=[1], want="two", where="here", mend="give two"),
        BadAnswer.of(Refused("an answer", have={"rows": 3})),
        DeadlineExceeded("a wait", mend="wait longer"),
        WorkerFailed("a rank raised", group="g", rank=1, method="m", traceback="Traceback", log_tail=("a line",)),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("cross", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_an_error_says_the_same_after_it_has_crossed_processes(
    error: ManymeshError, cross: Callable[[ManymeshError], ManymeshError]
) -> None:
    other = cross(error)
    assert type(other) is type(error)
    assert str(other) == str(error)
    assert (other.args, vars(other)) == (error.args, vars(error))
