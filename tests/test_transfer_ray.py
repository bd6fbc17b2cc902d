"""Weights between worlds of several processes on Ray; ends that die in the midst of a transfer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import ray
import torch

from core.engine import WeightSpec
from core.errors import TransferFailed, WorkerFailed
from core.group import RayClassWithInitArgs, WorkerGroup
from core.loss import LossSpec
from core.transport.ray import RayResourcePool, RayWorkerGroup
from manymesh.workers import ActorRolloutRefConfig, RolloutWorkerConfig, TrainingWorkerConfig, WeightSync
from manymesh.workers.transfer.channel import Channel
from manymesh.workers.transfer.config import ObjectStoreConfig
from manymesh.workers.transfer.object_store import ObjectStoreTransfer
from manymesh.workers.transfer.receiver import Receiver
from manymesh.workers.transfer.sender import Sender
from sdk.testing import tiny_model
from tests.support.batches import training_batch
from tests.support.transfer_workers import MortalRollout, MortalTrainer
from tests.test_transfer import FIVE_BUCKETS, gap

KINDS = ["collective", "ipc", "object_store", "disk"]
ONE_KIND = ["collective", *(pytest.param(kind, marks=pytest.mark.ci) for kind in KINDS[1:])]
ENV = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("transfer") / "model")


@pytest.fixture(scope="module")
def pools(ray_cluster: None) -> Iterator[dict[str, RayResourcePool]]:
    pools_by_name = {
        name: RayResourcePool([size], name=name) for name, size in (("train", 2), ("sample", 1), ("wide", 2))
    }
    yield pools_by_name
    for pool in pools_by_name.values():
        pool.shutdown()


def trainers(model: str, pool: RayResourcePool, backend: str = "fsdp", **engine: Any) -> WorkerGroup:
    loss = LossSpec("manymesh.recipes.grpo.loss:policy_loss")
    engine |= {"model": model, "optimizer": {"lr": 1e-2}}
    actor = TrainingWorkerConfig(backend=backend, engine=engine, loss=loss)
    config = ActorRolloutRefConfig(role="actor", actor=actor)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(MortalTrainer, config), name="trainers", env=ENV)
    group.init_model()
    return group


def rollouts(model: str, pool: RayResourcePool) -> WorkerGroup:
    config = RolloutWorkerConfig(engine={"model": model})
    group = RayWorkerGroup(pool, RayClassWithInitArgs(MortalRollout, config), name="rollouts", env=ENV)
    group.init_model()
    return group


@pytest.fixture(scope="module")
def senders(model: str, pools: Any) -> Iterator[WorkerGroup]:
    with trainers(model, pools["train"]) as group:
        yield group


@pytest.fixture(scope="module")
def receivers(model: str, pools: Any) -> Iterator[WorkerGroup]:
    with rollouts(model, pools["sample"]) as group:
        yield group


def make_sync(kind: str, senders: WorkerGroup, receivers: WorkerGroup, directory: Path, **more: Any) -> WeightSync:
    options = {"directory": str(directory)} if kind == "disk" else {}
    return WeightSync(senders, [receivers], kind=kind, options=options, **{"bucket_mb": FIVE_BUCKETS, **more})


@pytest.mark.parametrize("kind", ONE_KIND)
def test_two_sharded_trainers_feed_a_rollout_and_their_world_goes_on(
    senders: WorkerGroup, receivers: WorkerGroup, kind: str, tmp_path: Path
) -> None:
    with make_sync(kind, senders, receivers, tmp_path) as sync:
        for _ in range(2):
            senders.update_actor(training_batch(), temperature=1.0)  # collectives of the trainers' own world
            assert gap(senders, receivers) > 1e-4
            version = sync.sync()
            assert receivers.rollout_version() == version
            assert gap(senders, receivers, version) < 1e-4


@pytest.mark.ci  # tests/test_transfer.py refuses in threads
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_refuses_a_bucket_stops_the_sync_and_the_groups_stay_healthy(
    senders: WorkerGroup, receivers: WorkerGroup, kind: str, tmp_path: Path
) -> None:
    with make_sync(kind, senders, receivers, tmp_path) as sync:
        sync.sync()
        receivers.end_at_bucket(3, 0, "refuse")
        start = time.monotonic()
        with pytest.raises(TransferFailed, match=r"the link is down[\s\S]*receiver 1 of 1 \(group 'rollouts', rank 0"):
            sync.sync()
        assert time.monotonic() - start < 20
        assert receivers.rollout_version() is None
        version = sync.sync()
        assert gap(senders, receivers, version) < 1e-4


@pytest.mark.ci
def test_no_more_than_two_buckets_are_in_the_object_store_at_a_time(ray_cluster: None) -> None:
    weights = [(f"w{i}", torch.randn(1000)) for i in range(9)]
    specs = [WeightSpec(name, (1000,), "float32") for name, _ in weights]
    channel = Channel.serve("127.0.0.1", 20)
    transfers = [ObjectStoreTransfer(ObjectStoreConfig()) for _ in range(2)]
    loads: list[Any] = []
    counts: list[int] = []

    def is_held(number: int) -> bool:
        try:
            return bool(ray.get(transfers[0]._references.get.remote(number)))
        except KeyError:
            return False

    class Loading:
        def load_bucket(self, bucket: Any) -> None:
            time.sleep(0.05)  # the sender runs ahead as far as it may
            counts.append(sum(is_held(number) for number in range(9)))
            loads.extend((name, tensor.clone()) for name, tensor in bucket)

        def finish_weight_update(self) -> None:
            loads.append("finished")

    def send() -> None:
        transfers[0].connect(channel.round("connect"), 0, 1, "127.0.0.1")
        Sender(channel, transfers[0], "sender", 1, 4000, torch.device("cpu")).send(specs, iter(weights), "sync", 1)

    sending = Thread(target=send)
    sending.start()
    far = Channel.join(channel.address, 20)
    transfers[1].connect(far.round("connect"), 1, 1, "127.0.0.1")
    rollout: Any = Loading()
    receipt = Receiver(far, transfers[1], "receiver", 1, 4000, torch.device("cpu"), index=1).receive(
        specs, rollout, "sync", 1
    )
    sending.join(20)
    assert receipt.error == ""
    assert [name for name, _ in loads[:-1]] == [name for name, _ in weights]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(loads[:-1], weights, strict=True))
    assert max(counts) == 2
    assert not any(is_held(number) for number in range(9))
    for transfer in transfers:
        transfer.close()


def test_a_receiver_that_is_killed_fails_its_group_alone_and_soon(
    senders: WorkerGroup, receivers: WorkerGroup, tmp_path: Path
) -> None:
    killed_in_a_sync("collective", senders, receivers, tmp_path)
    senders.update_actor(training_batch(), temperature=1.0)


def killed_in_a_sync(kind: str, senders: WorkerGroup, receivers: WorkerGroup, directory: Path) -> None:
    sync = make_sync(kind, senders, receivers, directory, timeout_s=60.0)
    sync.sync()
    receivers.end_at_bucket(3, 0, "die")
    start = time.monotonic()
    with pytest.raises(WorkerFailed, match="'rollouts' died"):
        sync.sync()
    assert time.monotonic() - start < 30, "not the deadline"
    assert receivers.failed
    assert not senders.failed


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_two_trainers_go_on_with_new_rollouts_after_one_of_two_was_killed_or_refused(
    senders: WorkerGroup, model: str, pools: Any, kind: str, tmp_path: Path
) -> None:
    with rollouts(model, pools["wide"]) as receivers:
        with make_sync(kind, senders, receivers, tmp_path) as sync:
            receivers.end_at_bucket(3, 1, "refuse")
            with pytest.raises(TransferFailed, match=r"receiver 2 of 2 \(group 'rollouts', rank 1"):
                sync.sync()
            assert receivers.rollout_version() is None, "on all ranks alike"
            version = sync.sync()
            assert gap(senders, receivers, version) < 1e-4
        killed_in_a_sync(kind, senders, receivers, tmp_path)
    senders.update_actor(training_batch(), temperature=1.0)
    with rollouts(model, pools["wide"]) as fresh, make_sync(kind, senders, fresh, tmp_path) as again:
        version = again.sync()
        assert gap(senders, fresh, version) < 1e-4


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sender_that_is_killed_fails_its_group_alone_and_soon(
    senders: WorkerGroup, model: str, pools: Any, kind: str, tmp_path: Path
) -> None:
    senders.shutdown()
    with rollouts(model, pools["wide"]) as survivors:
        mortal = trainers(model, pools["train"])
        sync = make_sync(kind, mortal, survivors, tmp_path, timeout_s=60.0)
        sync.sync()
        mortal.die_at_tensor(15)
        start = time.monotonic()
        with pytest.raises(WorkerFailed, match="'trainers' died"):
            sync.sync()
        assert time.monotonic() - start < 30, "not the deadline"
        assert survivors.rollout_version() is None
        with trainers(model, pools["train"]) as fresh, make_sync(kind, fresh, survivors, tmp_path) as again:
            assert again.sync() == 0
            assert gap(fresh, survivors, 0) < 1e-4


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("axis", ["tensor_parallel", "pipeline_parallel"])
def test_a_megatron_trainer_that_is_cut_in_two_feeds_whole_rollouts(
    senders: WorkerGroup, receivers: WorkerGroup, model: str, pools: Any, axis: str, tmp_path: Path
) -> None:
    senders.shutdown()
    receivers.shutdown()
    with (
        rollouts(model, pools["wide"]) as two,
        trainers(model, pools["train"], "megatron", **{axis: 2}) as sharded,
        make_sync("collective", sharded, two, tmp_path) as sync,
    ):
        for _ in range(2):
            sharded.update_actor(training_batch(), temperature=1.0)
            assert gap(sharded, two) > 1e-4
            version = sync.sync()
            assert gap(sharded, two, version) < 1e-4
