"""Groups on Ray: placement, order of ranks, rendezvous, and what happens when a worker fails."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import ray
import torch
from tensordict import TensorDict

from core._run.host import WorkerHost
from core._run.transport import Identity
from core.batch import object_column
from core.errors import DeadlineExceeded, Refused, WorkerFailed
from core.group import RayClassWithInitArgs
from core.transport.ray import RayResourcePool, RayWorkerGroup, ResourcePoolManager
from core.transport.ray.order import local_ranks, rank_order
from tests.support.workers import Echo, FailsToStart


@pytest.fixture(scope="module")
def pool(ray_cluster: None) -> Iterator[RayResourcePool]:
    with RayResourcePool([3], name="faults") as pool:
        yield pool


@pytest.fixture(scope="module")
def small_pool(ray_cluster: None) -> Iterator[RayResourcePool]:
    with RayResourcePool([2], name="small") as pool:
        yield pool


def echo_group(pool: RayResourcePool, name: str = "echo") -> RayWorkerGroup:
    ranks = list(range(pool.world_size))
    return RayWorkerGroup(pool, RayClassWithInitArgs(Echo, ranks, ranks), name=name)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def all_gone(pids: list[int], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while any(map(is_running, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def wait_for_cpus(num: int) -> None:
    """Ray gives room back a moment after it was asked to."""
    deadline = time.monotonic() + 60
    while ray.available_resources().get("CPU", 0) < num and time.monotonic() < deadline:
        time.sleep(0.1)


# ---------------------------------------------------------------------------------------------- order of ranks


def test_nodes_are_ordered_by_address_as_a_number() -> None:
    hosts = [*range(9, 1, -1), *range(73, 65, -1)]
    order = rank_order([Identity(f"id{host}", f"10.0.0.{host}", 1) for host in hosts])
    assert [hosts[i] for i in order] == [*range(2, 10), *range(66, 74)]


def test_ranks_within_nodes_are_ordered_by_gpu() -> None:
    places = [
        Identity("b", "10.0.0.2", 1, ("1",)),
        Identity("a", "10.0.0.1", 1, ("0",)),
        Identity("b", "10.0.0.2", 1, ("0",)),
        Identity("a", "10.0.0.1", 1, ("1",)),
    ]
    assert rank_order(places) == [1, 3, 2, 0]
    assert local_ranks([places[i] for i in rank_order(places)]) == [(0, 2), (1, 2), (0, 2), (1, 2)]


def test_gpu_10_comes_after_gpu_9_and_nodes_of_one_address_are_told_apart_by_id() -> None:
    places = [Identity("y", "::1", 1, ("10",)), Identity("y", "::1", 1, ("9",)), Identity("x", "::1", 1, ("11",))]
    assert rank_order(places) == [2, 1, 0]


# ---------------------------------------------------------------------------------------------- placement


def test_a_pool_that_cannot_be_placed_is_refused_at_once_with_need_and_supply(ray_cluster: None) -> None:
    began = time.monotonic()
    with pytest.raises(Refused, match="CPU needs 24, has 6"):
        RayResourcePool([8], max_colocate_count=3).placement_groups()
    with pytest.raises(Refused, match="GPU needs 2, has 0"):
        RayResourcePool([2], use_gpu=True).placement_groups()
    with pytest.raises(Refused, match="at least one process"):
        RayResourcePool([])
    assert time.monotonic() - began < 2


def test_a_pool_whose_room_is_held_by_another_is_refused_with_what_is_free(pool: RayResourcePool) -> None:
    pool.placement_groups()
    wait_for_cpus(3)
    with pytest.raises(Refused, match="found no room") as refusal:
        RayResourcePool([4], name="second", placement_timeout_s=0.5).placement_groups()
    assert "3 free" in str(refusal.value)


def test_a_pool_that_was_refused_can_be_used_once_there_is_room(ray_cluster: None) -> None:
    with RayResourcePool([1], placement_timeout_s=3) as late:
        with RayResourcePool([int(ray.available_resources()["CPU"])]) as holder:
            holder.placement_groups()
            with pytest.raises(Refused, match="found no room") as refusal:
                echo_group(late)
        wait_for_cpus(1)
        with echo_group(late) as group:
            assert group.num_calls() == [0]
        assert refusal.tb is not None  # the refusal still held on to what it had made


def test_roles_share_the_pool_that_they_are_mapped_to(pool: RayResourcePool) -> None:
    manager = ResourcePoolManager({"global": [1]}, {"actor": "global", "ref": "global"})
    assert manager.get_resource_pool("actor") is manager.get_resource_pool("ref")
    with pytest.raises(Refused, match="did you mean 'actor'"):
        manager.get_resource_pool("actors")
    manager.shutdown()
    with pytest.raises(Refused, match="mapped to pool 'elsewhere'"):
        ResourcePoolManager({"global": [1]}, {"actor": "elsewhere"}).create_resource_pool()


# ---------------------------------------------------------------------------------------------- processes


def test_workers_know_their_place_and_form_one_world(pool: RayResourcePool) -> None:
    with echo_group(pool) as group:
        places = group.place()
        assert [place["RANK"] for place in places] == ["0", "1", "2"]
        assert [place["LOCAL_RANK"] for place in places] == ["0", "1", "2"]
        assert [place["RAY_LOCAL_RANK"] for place in places] == ["0", "1", "2"]
        # Given no GPU, they see none, whatever the machine has.
        assert [(place["CUDA_VISIBLE_DEVICES"], place["ids"]) for place in places] == [("", None)] * 3
        assert {place["RAY_LOCAL_WORLD_SIZE"] for place in places} == {place["WORLD_SIZE"] for place in places} == {"3"}
        assert len({(place["MASTER_ADDR"], place["MASTER_PORT"]) for place in places}) == 1
        assert group.sum_ranks() == [3, 3, 3]
        pids = [place["pid"] for place in places]
        assert [identity.pid for identity in group.identities] == pids
    assert all_gone(pids, within_s=2)
    with pytest.raises(Refused, match="shut down"):
        group.num_calls()


@pytest.mark.ci  # test_futures has two as well
def test_two_groups_in_pools_of_their_own_work_side_by_side(ray_cluster: None) -> None:
    with (
        RayResourcePool([1]) as one,
        RayResourcePool([1]) as other,
        echo_group(one, "a") as a,
        echo_group(other, "b") as b,
    ):
        batch = TensorDict({"x": torch.arange(6)}, batch_size=[6])
        assert b.echo(a.later(batch))["x"].tolist() == list(range(6))


def test_no_two_rendezvous_ever_get_the_same_port() -> None:
    for _ in range(25):
        hosts = [WorkerHost() for _ in range(8)]
        assert len({host.open_rendezvous("127.0.0.1") for host in hosts}) == 8


def test_a_killed_rank_is_reported_within_5_s_with_all_that_is_known_and_its_peers_are_ended(
    pool: RayResourcePool,
) -> None:
    group = echo_group(pool)
    pids = [identity.pid for identity in group.identities]
    batch = TensorDict({"x": torch.arange(6)}, batch_size=[6])
    group.echo(batch)  # so that the time below holds no imports
    group.sum_ranks()
    began = time.monotonic()
    with pytest.raises(WorkerFailed) as failure:
        group.be_killed(batch, rank=2)
    assert time.monotonic() - began < 5
    assert all_gone(pids, within_s=2)
    error = failure.value
    assert (error.rank, error.pid, error.method, error.mesh, error.group) == (2, pids[2], "be_killed", "m", "echo")
    assert error.node == group.identities[2].node_address
    assert error.exit
    assert "last words of the rank that is killed" in error.log_tail
    assert group.failed
    with pytest.raises(WorkerFailed, match="has failed earlier"):
        group.num_calls()


def test_an_exception_on_one_rank_is_what_the_driver_raises_while_its_peers_wait_in_a_collective(
    small_pool: RayResourcePool,
) -> None:
    group = echo_group(small_pool)
    pids = [identity.pid for identity in group.identities]
    group.sum_ranks()
    began = time.monotonic()
    with pytest.raises(WorkerFailed) as failure:
        group.fail(1)
    assert time.monotonic() - began < 5
    assert all_gone(pids, within_s=2)
    assert failure.value.rank == 1
    assert "ZeroDivisionError: the one at fault" in str(failure.value)
    assert "raise ZeroDivisionError" in (failure.value.traceback or "")
    assert isinstance(failure.value.__cause__, ZeroDivisionError)


@pytest.mark.ci
def test_the_death_is_blamed_and_not_what_its_peers_make_of_it(pool: RayResourcePool) -> None:
    group = echo_group(pool)
    group.sum_ranks()
    with pytest.raises(WorkerFailed, match="process of rank 2"):
        group.fail_behind_another_error(2)


def test_a_failure_that_nobody_asked_for_yet_is_what_the_next_call_raises(small_pool: RayResourcePool) -> None:
    group = echo_group(small_pool)
    group.sum_ranks()
    future = group.fail_later(1)
    began = time.monotonic()
    with pytest.raises(WorkerFailed, match="the one at fault"):
        group.num_calls()
    assert time.monotonic() - began < 5
    with pytest.raises(WorkerFailed, match="the one at fault"):
        future.result()


def test_arguments_that_cannot_be_pickled_are_refused_before_any_rank_gets_its_own(small_pool: RayResourcePool) -> None:
    with echo_group(small_pool) as group:
        batch = TensorDict({"x": torch.arange(2), "o": object_column([1, threading.Lock()])}, batch_size=[2])
        with pytest.raises(Refused, match="cannot be sent"):
            group.echo(batch)
        assert group.num_calls() == [0, 0]
        with pytest.raises(WorkerFailed, match="out of KV blocks"):
            group.raise_own_class()


def test_a_full_pool_refuses_another_group_at_once(small_pool: RayResourcePool) -> None:
    with echo_group(small_pool), pytest.raises(Refused, match="is full"):
        echo_group(small_pool)


def test_a_call_past_its_deadline_names_the_ranks_that_did_not_answer_and_ends_the_group(
    small_pool: RayResourcePool,
) -> None:
    group = echo_group(small_pool)
    pids = [identity.pid for identity in group.identities]
    with pytest.raises(DeadlineExceeded, match=re.escape("ranks [1]")) as failure:
        group.too_slow(1)
    assert "'too_slow'" in str(failure.value)
    assert all_gone(pids, within_s=2)


@pytest.mark.parametrize(("how", "error"), [("refuse", Refused), ("raise", WorkerFailed)])
def test_a_constructor_that_raises_is_raised_by_the_groups_and_leaves_no_process(
    pool: RayResourcePool, how: str, error: type[Exception]
) -> None:
    with pytest.raises(error) as failure:
        RayWorkerGroup(pool, RayClassWithInitArgs(FailsToStart, how))
    if isinstance(failure.value, WorkerFailed):
        assert failure.value.rank == 2
        assert failure.value.method == "__init__"
        assert "no such accelerator" in str(failure.value)
        assert all_gone([failure.value.pid], within_s=2)


def test_a_future_that_is_waiting_gives_way_to_other_groups(small_pool: RayResourcePool) -> None:
    with echo_group(small_pool) as group:
        future = group.sleep(0.5)
        assert not future.done()
        assert future.result() == [0.5] * 2
        assert future.done()


DRIVER = """
import ray, sys, time
from core.group import RayClassWithInitArgs
from core.transport.ray import RayResourcePool, RayWorkerGroup
from tests.support.workers import Echo
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
group = RayWorkerGroup(RayResourcePool([1]), RayClassWithInitArgs(Echo, [0], [0]))
print("PIDS", *[identity.pid for identity in group.identities], flush=True)
{then}
"""


@pytest.mark.parametrize(
    ("then", "end"),
    [
        pytest.param("raise RuntimeError", None, marks=pytest.mark.ci),
        ("group.sleep(600).result()", lambda process: process.send_signal(signal.SIGKILL)),
    ],
    ids=["exception", "kill -9"],
)
def test_nothing_is_left_running_when_the_driver_ends(
    then: str, end: Callable[[subprocess.Popen[str]], None] | None
) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER).format(then=then)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    line = next(line for line in process.stdout if line.startswith("PIDS"))
    if end is not None:
        end(process)
    process.wait(timeout=60)
    assert all_gone([int(pid) for pid in line.split()[1:]], within_s=10)
