"""Dispatch and collect on both transports: no row is lost or moved, and bad requests do no harm."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from core.batch import jagged, metadata, object_column, objects, to_padded, with_metadata
from core.dispatch import Dispatch, DispatchMode, Execute, PerRank, method_specs, on_mesh, register
from core.errors import BadAnswer, Refused, WorkerFailed
from core.group import RayClassWithInitArgs, WorkerGroup
from core.transport.local import LocalWorkerGroup
from core.worker import Worker
from tests.support.workers import Clashing, Echo, FailsToStart, Inheriting, Nested

PERMUTED = ([1, 1, 0, 0], [0, 2])


def local(*args: Any, cls: type = Echo, world_size: int = 4, **kwargs: Any) -> LocalWorkerGroup:
    return LocalWorkerGroup(RayClassWithInitArgs(cls, *args, **kwargs), world_size=world_size)


@pytest.fixture(scope="module")
def ray_group(ray_cluster: None) -> Iterator[WorkerGroup]:
    from core.transport.ray import RayResourcePool, RayWorkerGroup

    with (
        RayResourcePool([4], name="dispatch") as pool,
        RayWorkerGroup(pool, RayClassWithInitArgs(Echo, *PERMUTED)) as group,
    ):
        yield group


@pytest.fixture(params=["local", "ray"])
def group(request: pytest.FixtureRequest) -> WorkerGroup:
    """Four ranks whose dp ranks are permuted: rank 0 and 1 have dp rank 1."""
    if request.param == "ray":
        return request.getfixturevalue("ray_group")  # type: ignore[no-any-return]
    return local(*PERMUTED)


def batch_of(rows: int = 8) -> TensorDict:
    return TensorDict(
        {
            "x": torch.arange(rows),
            "y": torch.arange(rows) / 2,
            "names": object_column([f"row {i}" for i in range(rows)]),
            "tokens": jagged([torch.arange(i % 4) for i in range(rows)]),
        },
        batch_size=[rows],
    )


def test_rows_come_back_in_the_order_in_which_they_were_given(group: WorkerGroup) -> None:
    batch = batch_of()
    answer = group.echo(batch)
    assert answer["x"].tolist() == list(range(8))
    assert objects(answer.get("names")) == [f"row {i}" for i in range(8)]
    assert torch.equal(answer["tokens"].values(), batch["tokens"].values())


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_mesh_gives_the_rows_back_in_order(data: st.DataObject) -> None:
    dp_size = data.draw(st.integers(1, 4))
    width = data.draw(st.integers(1, 8 // dp_size))
    dp_ranks = data.draw(st.permutations([dp for dp in range(dp_size) for _ in range(width)]))
    collected = [data.draw(st.sampled_from([r for r, d in enumerate(dp_ranks) if d == dp])) for dp in range(dp_size)]
    num_blocks = data.draw(st.integers(1, 3))
    rows = dp_size * num_blocks * data.draw(st.integers(1, 3))
    group = local(dp_ranks, collected, world_size=dp_size * width)
    assert group.echo(batch_of(rows))["x"].tolist() == list(range(rows))
    answer = group.in_blocks(batch_of(rows), num_blocks)
    assert answer["row"].tolist() == answer["x"].tolist() == list(range(rows))
    assert answer["block"].tolist() == [i * num_blocks // rows for i in range(rows)]
    assert group.repeat(batch_of(rows), 3)["x"].tolist() == [i for i in range(rows) for _ in range(3)]


@pytest.mark.parametrize(
    ("dp_ranks", "collected", "hints"),
    [
        ([0, 0, 1, 1], [0], ["'m'", "dp rank 1", "[2, 3]"]),
        ([0, 0, 1, 1], [0, 1, 2], ["'m'", "[0, 1]"]),
        ([0, 2, 0, 2], [0, 1], ["'m'", "0..1"]),
    ],
)
def test_a_mesh_that_would_lose_or_double_rows_is_refused_before_a_worker_runs(
    dp_ranks: list[int], collected: list[int], hints: list[str]
) -> None:
    group = local(dp_ranks, collected)
    with pytest.raises(Refused) as refusal:
        group.echo(batch_of())
    assert all(text in str(refusal.value) for text in hints)
    assert group.num_calls() == [0, 0, 0, 0]
    assert not group.failed


@pytest.mark.parametrize("num_rows", [2, 3, 7, 8, 9])
@pytest.mark.parametrize("policy", ["padded", "ragged"])
def test_rows_that_do_not_divide_come_back_as_they_went(group: WorkerGroup, policy: str, num_rows: int) -> None:
    batch = batch_of(num_rows)
    answer = getattr(group, policy)(batch)
    assert answer["x"].tolist() == answer["row"].tolist() == list(range(num_rows))
    assert objects(answer.get("names")) == [f"row {i}" for i in range(num_rows)]
    assert torch.equal(answer["tokens"].values(), batch["tokens"].values())
    assert "row_weight" not in answer.keys()  # noqa: SIM118
    assert set(batch.keys()) == {"x", "y", "names", "tokens"}
    counts = answer["got"].tolist()
    assert max(counts) - min(counts) <= (policy == "ragged")


def test_uneven_mini_batches_come_back_in_order_and_every_rank_runs_as_many(group: WorkerGroup) -> None:
    for policy, rows in (("padded", 5), ("padded", 11), ("ragged", 11)):
        answer = getattr(group, policy)(batch_of(rows), 3)
        assert answer["row"].tolist() == list(range(rows))
        assert set(answer["steps"].tolist()) == {3}


def test_the_mean_of_a_metric_counts_no_filler(group: WorkerGroup) -> None:
    assert group.mean_of_x(batch_of(5))["mean"] == 2.0
    assert local([0], [0], world_size=1).mean_of_x(batch_of(5))["mean"] == 2.0


def test_dicts_are_joined_by_the_reducers_declared_for_their_keys(group: WorkerGroup) -> None:
    whole = group.reduced(batch_of())
    assert whole == {"loss": 2.5, "n": 8, "name": "a", "tags": [2, 0], "own": [2, 0]}


def test_what_differs_by_rank_is_said_so_by_its_wrapper(group: WorkerGroup) -> None:
    answers = group.each(PerRank("abcd"), [1, 2, 3, 4], key=PerRank([4, 3, 2, 1]))
    assert answers == [(rank, "abcd"[rank], ([1, 2, 3, 4],), {"key": 4 - rank}) for rank in range(4)]
    assert group.compute(PerRank([1, 2, 3, 4])) == [(rank, rank + 1, None) for rank in range(4)]
    with pytest.raises(Refused, match="one value for each rank"):
        group.each(PerRank("abc"))
    with pytest.raises(Refused, match="ALL_TO_ALL"):
        group.see(PerRank("abcd"))
    with pytest.raises(Refused, match="no PerRank"):
        group.compute([1, 2, 3, 4])


def test_modes_over_the_world_split_over_all_ranks(group: WorkerGroup) -> None:
    assert group.over_world(batch_of())["rank"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert group.with_function(double_x, batch_of())["x"].tolist() == [2 * i for i in range(8)]
    whole, own = group.metric(batch_of())
    assert whole["loss"] == 6
    assert whole["rows"]["x"].tolist() == list(range(8))
    assert [each["loss"] for each in own] == [0, 1, 2, 3]
    assert own[1]["rows"]["x"].tolist() == [2, 3]


def test_a_method_of_the_rollouts_server_is_refused_on_the_driver_with_what_to_use(group: WorkerGroup) -> None:
    with pytest.raises(Refused, match="rollout's server"):
        group.direct()


def double_x(batch: TensorDict) -> TensorDict:
    batch["x"] = batch["x"] * 2
    return batch


def test_positional_and_keyword_arguments_behave_alike(group: WorkerGroup) -> None:
    for answer in (group.echo(batch_of()), group.echo(batch=batch_of()), group.echo(batch_of(), other=None)):
        assert answer["x"].tolist() == list(range(8))
    assert group.second(batch_of(), batch_of())["x"].tolist() == list(range(8))
    assert group.second(batch_of(), other=batch_of())["x"].tolist() == list(range(8))
    assert group.second(other=batch_of(), batch=batch_of())["x"].tolist() == list(range(8))


def test_batches_of_unequal_length_in_one_call_are_refused_with_both_lengths(group: WorkerGroup) -> None:
    with pytest.raises(Refused) as refusal:
        group.second(batch_of(8), other=batch_of(6))
    assert "batch: 8 rows" in str(refusal.value)
    assert "other: 6 rows" in str(refusal.value)


def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_legal_sizes(group: WorkerGroup) -> None:
    with pytest.raises(Refused) as refusal:
        group.echo(batch_of(7))
    text = str(refusal.value)
    assert all(part in text for part in ("7 rows", "dp size 2", "'m'", "'echo'", "6, 8"))
    with pytest.raises(Refused, match="3 mini-batches"):
        group.in_blocks(batch_of(8), 3)
    with pytest.raises(Refused, match="sizes: 2"):
        group.echo(batch_of(2)[:0].exclude("tokens", "names"))
    assert group.echo(batch_of(4))["x"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("value", [[10, 20, 30, 40], (10, 20, 30, 40), [10, 20, 30], None, 7, {"a": 1}])
def test_what_is_no_batch_reaches_every_rank_as_it_is(group: WorkerGroup, value: Any) -> None:
    assert group.see(value, value, key=value) == [(rank, value, (value,), {"key": value}) for rank in range(4)]


def test_rank_zero_runs_on_rank_zero_alone_and_gives_its_value(group: WorkerGroup) -> None:
    before = group.num_calls()
    assert group.zero(7) == (0, 7)
    assert group.see_on_zero(7) == (0, 7)
    assert group.num_calls() == [before[0] + 2, *before[1:]]


def test_what_a_worker_does_to_its_batch_arrives_and_touches_nobody_else(group: WorkerGroup) -> None:
    batch = batch_of()
    answer = group.edit(batch)
    assert answer["rank"].tolist() == [2, 2, 2, 2, 0, 0, 0, 0]
    assert answer["x"].tolist() == [2 * i for i in range(8)]
    assert "y" not in answer.keys()  # noqa: SIM118
    assert batch["x"].tolist() == list(range(8))
    assert group.echo(batch)["x"].tolist() == list(range(8))


def test_answers_that_are_no_batches_are_joined_as_they_declare_or_kept_by_dp_rank(group: WorkerGroup) -> None:
    assert group.answer(batch_of(), "none") is None
    assert group.answer(batch_of(), "number") == [2, 0]
    metrics = group.answer(batch_of(), "metric")
    assert metrics == {"loss": 0.5, "peak": 2.0}
    rows, ranks = group.answer(batch_of(), "pair")
    assert rows["x"].tolist() == list(range(8))
    assert ranks == {"rank": [2, 0]}


def test_one_rank_that_answers_none_where_others_answer_batches_is_named(group: WorkerGroup) -> None:
    with pytest.raises(BadAnswer) as error:
        group.answer(batch_of(), "some_none")
    assert "rank 0: NoneType" in str(error.value)


def test_an_answer_with_other_rows_than_the_input_is_a_bad_answer_of_a_healthy_group(group: WorkerGroup) -> None:
    with pytest.raises(BadAnswer, match="another number of rows") as error:
        group.drop_last_row(batch_of())
    assert all(text in str(error.value) for text in ("rank 2", "3 rows", "4 rows"))
    assert group.echo(batch_of())["x"].tolist() == list(range(8))


@pytest.mark.parametrize("kind", ["sparse", "lock"])
def test_an_answer_that_cannot_be_sent_is_a_bad_answer_of_a_healthy_group(group: WorkerGroup, kind: str) -> None:
    with pytest.raises(BadAnswer):
        group.unsendable(batch_of(), kind)
    assert group.echo(batch_of())["x"].tolist() == list(range(8))


def test_a_list_where_a_per_rank_was_meant_is_hinted_at_when_the_method_fails() -> None:
    with pytest.raises(WorkerFailed, match=r"wrap it in PerRank\(...\)"):
        local().divided([1, 2, 3, 4])
    with pytest.raises(WorkerFailed) as failure:
        local().divided([1, 2, 3])
    assert "PerRank" not in str(failure.value)


def test_a_reference_to_rays_store_is_refused_with_what_to_give_instead(ray_group: WorkerGroup) -> None:
    import ray

    with pytest.raises(Refused, match="reference to an object") as refusal:
        ray_group.see([ray.put(1)])
    assert "ray.get(reference)" in str(refusal.value)
    assert ray_group.see([1])[0][1] == [1]


def test_any_method_can_be_called_for_later(group: WorkerGroup) -> None:
    futures = [group.echo.later(batch_of()), group.place.later(), group.zero.later(1)]
    assert futures[0].result()["x"].tolist() == list(range(8))
    assert [place["RANK"] for place in futures[1].result()] in (["0", "1", "2", "3"], [None] * 4)
    assert futures[2].result() == (0, 1)


def test_a_setting_that_names_an_argument_which_is_not_there_is_refused() -> None:
    class Misspelt(Echo):
        @register(on_mesh("m"), num_blocks="num_blockz")
        def ragged(self, batch: Any, num_blocks: int = 1) -> Any:
            return batch

    group = local(*PERMUTED, cls=Misspelt)
    with pytest.raises(Refused, match="no argument 'num_blockz'"):
        group.ragged(batch_of())


def test_columns_whose_ragged_dim_is_not_the_second_make_the_round_trip(group: WorkerGroup) -> None:
    batch = batch_of()
    positions = torch.arange(3 * 12).view(3, 12)
    batch["position_ids"] = torch.nested.nested_tensor_from_jagged(
        positions.T.contiguous(), batch["tokens"].offsets()
    ).transpose(1, 2)
    answer = group.edit(batch)["position_ids"]
    assert answer.shape[1] == 3
    assert torch.equal(answer.transpose(1, 2).values(), positions.T)
    padded = to_padded(batch)["position_ids"]
    assert padded.shape == (8, 3, 3)
    assert padded[3].tolist() == [[3, 4, 5], [15, 16, 17], [27, 28, 29]]


def test_a_future_gives_what_a_blocking_call_gives_and_can_be_handed_on(group: WorkerGroup) -> None:
    future = group.later(batch_of())
    assert group.second(batch_of(), future)["x"].tolist() == list(range(8))
    assert future.done()
    assert future.result()["x"].tolist() == future.result()["x"].tolist() == list(range(8))


def test_large_batches_and_empty_columns_make_the_round_trip_and_stay_private(group: WorkerGroup) -> None:
    big = torch.arange(8 * 50_000, dtype=torch.float32).view(8, 50_000)
    batch = TensorDict({"x": torch.arange(8), "y": big.clone(), "none": torch.zeros(8, 0)}, batch_size=[8])
    assert group.edit(batch)["x"].tolist() == [2 * i for i in range(8)]
    answer = group.echo(batch)
    assert torch.equal(answer["y"], big)
    assert answer["none"].shape == (8, 0)
    assert batch["x"].tolist() == list(range(8))


def test_batches_that_are_not_joined_come_as_batches_of_the_drivers_own(group: WorkerGroup) -> None:
    both = group.batches_in_a_list(batch_of())["both"]
    assert [[each["x"].tolist() for each in pair] for pair in both] == [[[0, 1, 2, 3]] * 2, [[4, 5, 6, 7]] * 2]
    both[0][0]["x"].zero_()
    assert both[0][1]["x"].tolist() == [0, 1, 2, 3]


def test_numpy_arrays_are_the_workers_own_too(group: WorkerGroup) -> None:
    array = np.arange(3)
    answers = group.write_to(array)
    assert [answer.tolist() for answer in answers] == [[9, 1, 2]] * 4
    answers[0][1] = 7
    assert array.tolist() == [0, 1, 2]


def test_metadata_that_has_no_plain_equality_makes_the_round_trip(group: WorkerGroup) -> None:
    batch = with_metadata(batch_of(), array=np.arange(2), nothing=float("nan"))
    answer = group.echo(batch)
    assert metadata(answer, "array").tolist() == [0, 1]
    with pytest.raises(Refused, match="one value for the whole batch"):
        metadata(answer, "x")


def test_a_refusal_whose_fields_cannot_travel_is_still_a_refusal(group: WorkerGroup) -> None:
    with pytest.raises(Refused, match="a bad request"):
        group.refuse_with_a_lock()
    assert not group.failed


def test_an_override_with_more_arguments_keeps_the_settings_of_its_parent() -> None:
    class Wider(Echo):
        def repeat(self, batch: Any, times: int, extra: int = 0) -> Any:
            return super().repeat(batch, times + extra)

    assert local(*PERMUTED, cls=Wider).repeat(batch_of(), 2)["x"].tolist() == [i for i in range(8) for _ in range(2)]


def test_what_is_no_method_of_an_instance_is_refused_at_bind() -> None:
    class Static(Worker):
        @staticmethod
        @register()  # type: ignore[arg-type]
        def call() -> None: ...

    class Named(Worker):
        @register()
        def name(self) -> None: ...

    for cls in (Static, Named):
        with pytest.raises(Refused):
            local(cls=cls)


def test_an_override_without_the_decorator_keeps_the_spec_of_its_parent() -> None:
    group = local(*PERMUTED, cls=Inheriting)
    answer = group.echo(batch_of())
    assert answer["inherited"].tolist() == [1] * 8
    assert answer["x"].tolist() == list(range(8))
    with pytest.raises(AttributeError, match="no method 'zero'"):
        group.zero(1)


def test_bound_methods_have_the_workers_signature_and_docstring() -> None:
    group = local(*PERMUTED)
    assert list(inspect.signature(group.echo).parameters) == ["batch", "other"]
    assert group.echo.__doc__ == "Give the batch back."
    with pytest.raises(TypeError, match="missing a required argument: 'batch'"):
        group.echo()
    with pytest.raises(AttributeError, match="did you mean 'echo'"):
        group.ecko(batch_of())


def test_names_of_the_groups_own_are_refused_at_bind() -> None:
    with pytest.raises(Refused) as refusal:
        local(cls=Clashing, world_size=1)
    assert "world_size" in str(refusal.value)
    assert "shutdown" in str(refusal.value)


def test_a_worker_re_exports_the_meshes_of_inner_workers_under_its_own_names() -> None:
    group = local(cls=Nested)
    assert group.on_train(batch_of())["num"].tolist() == [2] * 8
    assert group.on_ref(batch_of())["num"].tolist() == [4] * 8
    with pytest.raises(Refused) as refusal:
        local(True, cls=Nested)
    assert "'train'" in str(refusal.value)


def test_a_mesh_that_the_worker_does_not_have_is_refused_with_those_it_has() -> None:
    class Misnamed(Nested):
        @register(on_mesh("refs"))
        def call(self, batch: Any) -> Any:
            return batch

    with pytest.raises(Refused, match="did you mean 'ref'"):
        local(cls=Misnamed).call(batch_of())


def test_a_refusal_on_all_ranks_leaves_the_group_healthy_and_one_on_some_fails_it(group: WorkerGroup) -> None:
    with pytest.raises(Refused, match="a bad request"):
        group.refuse([0, 1, 2, 3])
    assert group.zero(1) == (0, 1)
    assert not group.failed
    mixed = local(*PERMUTED)
    with pytest.raises(WorkerFailed, match="only ranks"):
        mixed.refuse([1])
    assert mixed.failed


@pytest.mark.parametrize(("how", "error"), [("refuse", Refused), ("raise", WorkerFailed)])
def test_a_constructor_that_raises_is_raised_by_the_groups(how: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        local(how, cls=FailsToStart)


def test_a_mode_of_ones_own_is_an_object_handed_to_register() -> None:
    reversed_list = DispatchMode(
        "reversed", Dispatch.ONE_TO_ALL.dispatch, lambda call, answers: [answers[r] for r in sorted(answers)][::-1]
    )

    class Own(Worker):
        @register(reversed_list)
        def number(self) -> int:
            return self.rank

    assert local(cls=Own).number() == [3, 2, 1, 0]


def test_what_cannot_be_registered_is_refused() -> None:
    with pytest.raises(Refused, match="DispatchMode"):
        register("ONE_TO_ALL")
    with pytest.raises(Refused, match="DispatchMode"):
        register(7)  # type: ignore[call-overload]
    with pytest.raises(Refused, match="'mean'"):
        register(on_mesh("m"), reducers={"loss": "means"})
    with pytest.raises(Refused, match="rows_per_input"):
        register(on_mesh("m"), rows_per_input=None, num_blocks=2)
    with pytest.raises(Refused, match="unknown policy"):
        register(on_mesh("m"), uneven="paddd")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="colums"):
        register(on_mesh("m"), colums=["x"])  # type: ignore[call-overload]
    for mode in (on_mesh("m"), Dispatch.DP_COMPUTE_PROTO, Dispatch.DP_COMPUTE_METRIC):
        with pytest.raises(Refused, match="runs on all ranks"):
            register(mode, execute_mode=Execute.RANK_ZERO)


def test_scanning_a_class_evaluates_nothing() -> None:
    specs = method_specs(Echo)
    assert "echo" in specs
    assert "explosive" not in specs
