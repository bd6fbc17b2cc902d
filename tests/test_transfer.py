"""Weights that cross from a trainer to rollouts elsewhere: all of them or none, and never silently."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from core.batch import jagged_from
from core.errors import ConfigError, DeadlineExceeded, Refused, RegistryError, TransferFailed, WorkerFailed
from core.group import RayClassWithInitArgs, WorkerGroup
from core.loss import LossSpec
from core.rollout import SamplingParams
from core.transport.local import LocalWorkerGroup
from manymesh.workers import (
    ActorRolloutRefConfig,
    ActorRolloutRefWorker,
    RolloutWorker,
    RolloutWorkerConfig,
    TrainingWorkerConfig,
    WeightSync,
)
from manymesh.workers.transfer.collective import CollectiveTransfer
from sdk.testing import tiny_model
from tests.support.batches import training_batch

SAMPLING = SamplingParams(num_samples=2, max_new_tokens=6, seed=1, ignore_eos=True)
FIVE_BUCKETS = 0.09  # MiB, of the model below


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("transfer") / "model")


def trainers(model: str, make: Callable[..., WorkerGroup] = LocalWorkerGroup) -> WorkerGroup:
    actor = TrainingWorkerConfig(
        engine={"model": model, "optimizer": {"lr": 1e-2}}, loss=LossSpec("manymesh.recipes.grpo.loss:policy_loss")
    )
    config = ActorRolloutRefConfig(role="actor", actor=actor)
    group = make(RayClassWithInitArgs(ActorRolloutRefWorker, config), name="trainers")
    group.init_model()
    return group


def rollouts(model: str, make: Callable[..., WorkerGroup] = LocalWorkerGroup, name: str = "rollouts") -> WorkerGroup:
    group = make(RayClassWithInitArgs(RolloutWorker, RolloutWorkerConfig(engine={"model": model})), name=name)
    group.init_model()
    return group


def prompts(num_prompts: int = 4) -> TensorDict:
    lengths = torch.arange(num_prompts) % 3 + 2
    ids = torch.randint(3, 64, (int(lengths.sum()),), generator=torch.Generator().manual_seed(1))
    return TensorDict({"prompt_ids": jagged_from(ids, lengths)}, batch_size=[num_prompts])


def gap(senders: WorkerGroup, receivers: WorkerGroup, min_version: int | None = None) -> float:
    """Largest difference between the rollout's and the trainer's log-probs of sampled tokens."""
    samples = receivers.generate_sequences(prompts(), SAMPLING, min_version)
    scores = senders.compute_log_prob(samples, 1.0)
    mask = samples["response_mask"].values()
    return float((samples["rollout_log_probs"].values() - scores["old_log_probs"].values())[mask].abs().max())


def worker(group: WorkerGroup) -> Any:
    """The worker of a group in this process."""
    transport: Any = group._transport
    return transport._hosts[0].worker


@pytest.fixture(scope="module")
def groups(model: str) -> tuple[WorkerGroup, list[WorkerGroup]]:
    return trainers(model), [rollouts(model, name=name) for name in ("first", "second")]


@pytest.fixture
def sync_of(groups: Any, tmp_path: Path) -> Iterator[Callable[..., WeightSync]]:
    """Makes syncs between `groups`."""
    syncs: list[WeightSync] = []

    def make(kind: str = "collective", **more: Any) -> WeightSync:
        options = {"directory": str(tmp_path / "weights")} if kind == "disk" else {}
        syncs.append(WeightSync(*groups, kind=kind, options=options, **{"bucket_mb": FIVE_BUCKETS, **more}))
        return syncs[-1]

    yield make
    for sync in syncs:
        sync.close()


def refuse_bucket(monkeypatch: pytest.MonkeyPatch, group: WorkerGroup, number: int) -> None:
    """The rollout's load_bucket raises at its number-th call."""
    rollout, calls = worker(group).rollout, []
    load = rollout.load_bucket

    def limited(bucket: Any) -> None:
        calls.append(bucket)
        if len(calls) == number:
            raise OSError("the link is down")
        load(bucket)

    monkeypatch.setattr(rollout, "load_bucket", limited)


@pytest.mark.parametrize("kind", ["collective", "ipc", "disk"])
@pytest.mark.parametrize("bucket_mb", [4e-3, FIVE_BUCKETS, 16])
def test_after_a_sync_all_rollouts_have_the_trainers_weights_and_version(
    groups: Any, sync_of: Any, kind: str, bucket_mb: float, tmp_path: Path
) -> None:
    senders, receivers = groups
    sync = sync_of(kind, bucket_mb=bucket_mb)
    for _ in range(2):
        senders.update_actor(training_batch(), temperature=1.0)
        version = worker(senders).weight_version
        for group in receivers:
            with pytest.raises(Refused, match="too old"):
                gap(senders, group, version)
        assert sync.sync() == version == sync.version
        assert [gap(senders, group, version) < 1e-4 for group in receivers] == [True, True]
        assert receivers[0].rollout_version() == version
        sender, *receivers_receipts = sync.receipts
        assert len({receipt.digest for receipt in sync.receipts}) == 1
        assert [receipt.num_bytes for receipt in receivers_receipts] == [sender.num_bytes] * 2
    exports = dict(worker(senders).weight_source.engine.export_weights())
    state_dict = worker(receivers[0]).rollout._model.state_dict()
    assert all(torch.equal(state_dict[name], tensor) for name, tensor in exports.items())
    sync.close()
    assert not list((tmp_path / "weights").glob("*")), "nothing is left"


@pytest.mark.parametrize("kind", ["collective", "ipc", "disk"])
def test_a_receiver_that_fails_at_bucket_3_of_5_leaves_no_version_and_the_next_sync_sends_all_again(
    groups: Any, sync_of: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    senders, receivers = groups
    sync = sync_of(kind)
    before = sync.sync()
    senders.update_actor(training_batch(), temperature=1.0)
    with monkeypatch.context() as patch:
        refuse_bucket(patch, receivers[1], 3)
        start = time.monotonic()
        with pytest.raises(TransferFailed, match=r"the link is down[\s\S]*receiver 2 of 2"):
            sync.sync()
        assert time.monotonic() - start < 20, "nobody waits for a deadline"
    assert sync.version == before
    for group in receivers:  # all or none: the other had no reason of its own
        assert group.rollout_version() is None
        with pytest.raises(Refused, match="no valid weights"):
            gap(senders, group)
    assert sync.sync() == before + 1 == sync.version
    assert [gap(senders, group, before + 1) < 1e-4 for group in receivers] == [True, True]


class Staged:
    """A rollout that keeps its weights until the whole update is there."""

    def __init__(self, rollout: Any) -> None:
        self._rollout = rollout
        self._update: tuple[Any, int, list[Any]] = (None, 0, [])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rollout, name)

    def begin_weight_update(self, specs: Any, version: int) -> None:
        self._update = specs, version, []

    def load_bucket(self, bucket: Any) -> None:
        self._update[2].extend((name, tensor.clone()) for name, tensor in bucket)

    def finish_weight_update(self) -> None:
        self._rollout.begin_weight_update(*self._update[:2])
        self._rollout.load_bucket(self._update[2])
        self._rollout.finish_weight_update()

    def abort_weight_update(self) -> None:
        self._update = (None, 0, [])


def test_a_rollout_that_stages_keeps_its_old_version_whole_when_another_fails(
    groups: Any, sync_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    senders, receivers = groups
    sync = sync_of()
    before = sync.sync()
    samples = receivers[0].generate_sequences(prompts(), SAMPLING)
    staged = Staged(worker(receivers[0]).rollout)
    monkeypatch.setattr(worker(receivers[0]), "rollout", staged)
    monkeypatch.setattr(worker(receivers[0]).weight_sink, "rollout", staged)
    senders.update_actor(training_batch(), temperature=1.0)
    with monkeypatch.context() as patch:
        refuse_bucket(patch, receivers[1], 5)
        with pytest.raises(TransferFailed):
            sync.sync()
    assert receivers[0].rollout_version() == sync.version == before
    with pytest.raises(Refused, match="too old"):  # of the sync that failed it knows
        receivers[0].generate_sequences(prompts(), SAMPLING)
    again = receivers[0].generate_sequences(prompts(), SAMPLING, min_version=sync.version)
    assert torch.equal(again["rollout_log_probs"].values(), samples["rollout_log_probs"].values())
    assert sync.sync() == before + 1
    assert gap(senders, receivers[0], before + 1) < 1e-4


def test_names_are_checked_before_anything_changes(groups: Any, sync_of: Any, tmp_path: Path) -> None:
    senders, receivers = groups
    before = sync_of().sync()
    samples = receivers[0].generate_sequences(prompts(), SAMPLING)
    other = rollouts(tiny_model(tmp_path / "other", num_layers=1))
    sync = WeightSync(senders, [receivers[0], other])
    with pytest.raises(Refused, match=r"14 matched, 0 missing, 11 unexpected[\s\S]*layers.1"):
        sync.sync()
    assert other.rollout_version() == 0
    assert receivers[0].rollout_version() == before
    again = receivers[0].generate_sequences(prompts(), SAMPLING)
    assert torch.equal(again["rollout_log_probs"].values(), samples["rollout_log_probs"].values())
    sync.close()


def test_a_byte_that_changes_on_the_way_is_noticed_and_its_tensor_named(
    groups: Any, sync_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = CollectiveTransfer.receive

    def flipping(self: Any, round_: Any, number: int, sizes: Any) -> Any:
        pieces = receive(self, round_, number, sizes)
        if number == 2:
            pieces[0][7] ^= 4
        return pieces

    sync = sync_of()
    sync.sync()
    with monkeypatch.context() as patch:
        patch.setattr(CollectiveTransfer, "receive", flipping)
        with pytest.raises(TransferFailed, match=r"1 of 25 tensors did not arrive as they were sent[\s\S]*proj.weight"):
            sync.sync()
    assert groups[1][0].rollout_version() is None
    sync.sync()


def test_a_receiver_that_hangs_ends_the_sync_at_the_deadline(
    groups: Any, sync_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    senders, receivers = groups
    sync = sync_of(timeout_s=2.0)
    sync.sync()
    rollout = worker(receivers[0]).rollout
    with monkeypatch.context() as patch:
        patch.setattr(rollout, "load_bucket", lambda bucket: time.sleep(4))
        start = time.monotonic()
        late = r"receiver 1 of 2 \(group 'first', rank 0\)\n"
        with pytest.raises(TransferFailed, match=f"waited 2 s for all receivers to load bucket 0; .* not .* {late}"):
            sync.sync()
        assert 2 < time.monotonic() - start < 60
    assert sync.sync() == worker(senders).weight_version


def test_a_trainer_that_fails_while_it_exports_is_a_failed_group_and_receivers_are_set_free(model: str) -> None:
    senders, receivers = trainers(model), rollouts(model)
    sync = WeightSync(senders, [receivers], bucket_mb=FIVE_BUCKETS)
    sync.sync()
    engine = worker(senders).weight_source.engine
    export = engine.export_weights

    def failing(**options: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for number, pair in enumerate(export(**options)):
            if number == 15:
                raise MemoryError("no room")
            yield pair

    engine.export_weights = failing
    start = time.monotonic()
    with pytest.raises(WorkerFailed, match="no room"):
        sync.sync()
    assert time.monotonic() - start < 20
    assert receivers.rollout_version() in (None, 0)  # 0, the old one, where the news came before anything was loaded
    other = WeightSync(trainers(model), [receivers])
    assert other.sync() == 0
    assert receivers.rollout_version() == 0
    other.close()


def test_a_driver_that_cannot_reach_the_senders_store_syncs_all_the_same(
    groups: Any, sync_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    senders, receivers = groups

    def unreachable(address: Any, timeout_s: float) -> Any:
        raise DeadlineExceeded("nobody answers")

    monkeypatch.setattr("manymesh.workers.transfer.sync.Channel", SimpleNamespace(join=unreachable))
    sync = sync_of(timeout_s=2.0)
    sync.sync()
    with monkeypatch.context() as patch:
        refuse_bucket(patch, receivers[0], 2)
        with pytest.raises(TransferFailed, match="the link is down"):
            sync.sync()
    version = sync.sync()
    assert gap(senders, receivers[1], version) < 1e-4


def test_a_receiver_that_never_comes_is_waited_for_until_the_deadline(
    groups: Any, sync_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    senders, receivers = groups
    sync = sync_of(timeout_s=2.0)
    with monkeypatch.context() as patch:
        patch.setattr(worker(receivers[1]), "connect_weights", lambda end, connection, index, host: None)
        with pytest.raises(TransferFailed, match=r"did not meet[\s\S]*waited 2 s for receiver 2 of 2 to connect"):
            sync.sync()
    assert sync.sync() == worker(senders).weight_version


def test_a_rollout_worker_is_built_once_and_connected_before_it_receives(model: str) -> None:
    group = LocalWorkerGroup(RayClassWithInitArgs(RolloutWorker, RolloutWorkerConfig(engine={"model": model})))
    with pytest.raises(Refused, match="call init_model first"):
        group.rollout_version()
    group.init_model()
    assert group.rollout_version() == 0
    assert len(group.generate_sequences(prompts(), SAMPLING, 0)) == 8
    with pytest.raises(Refused, match="once"):
        group.init_model()
    with pytest.raises(Refused, match="not connected"):
        group.transfer_weights("sink", [], 1, "sync 1")


@pytest.mark.parametrize("kind", ["collective", "ipc", "disk"])
def test_syncs_leave_nothing_behind_in_the_store(groups: Any, sync_of: Any, kind: str) -> None:
    sync, sizes = sync_of(kind), []
    for _ in range(4):
        sync.sync()
        sizes.append(worker(groups[0]).weight_source._channel.store.num_keys())
    assert len(set(sizes)) == 1


def test_released_weights_come_back_with_the_next_sync(groups: Any, sync_of: Any) -> None:
    senders, receivers = groups
    receivers[0].release_rollout()
    with pytest.raises(Refused, match="no valid weights"):
        gap(senders, receivers[0])
    version = sync_of().sync()
    assert gap(senders, receivers[0], version) < 1e-4


def test_bad_requests_are_refused_before_anything_is_opened(groups: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    senders, receivers = groups
    with pytest.raises(RegistryError, match=r"there is no transfer 'colective'[\s\S]*did you mean 'collective'"):
        WeightSync(senders, receivers, kind="colective")
    with pytest.raises(Refused, match="no group"):
        WeightSync(senders, [])
    with pytest.raises(Refused, match="role 'actor' has no rollout"):
        WeightSync(senders, senders).sync()
    with pytest.raises(ConfigError, match="bucket_mb"):
        WeightSync(senders, receivers, bucket_mb=0)
    for options, message in (({}, "directory"), ({"directory": "here"}, "absolute")):
        with pytest.raises(ConfigError, match=message):
            WeightSync(senders, receivers, kind="disk", options=options)
    with monkeypatch.context() as without_ray:
        without_ray.setattr("ray.is_initialized", lambda: False)
        with pytest.raises(Refused, match="'object_store' needs Ray"):
            WeightSync(senders, receivers, kind="object_store").sync()
    assert WeightSync(senders, receivers).sync() == worker(senders).weight_version


def test_one_verb_serves_rollouts_in_the_trainers_processes_and_in_pools_of_their_own(model: str) -> None:
    actor = TrainingWorkerConfig(
        engine={"model": model, "optimizer": {"lr": 1e-2}}, loss=LossSpec("manymesh.recipes.grpo.loss:policy_loss")
    )
    config = ActorRolloutRefConfig(
        role="actor_rollout", actor=actor, rollout=RolloutWorkerConfig(engine={"model": model})
    )
    whole = LocalWorkerGroup(RayClassWithInitArgs(ActorRolloutRefWorker, config), name="whole")
    whole.init_model()
    alone = rollouts(model)
    with WeightSync(whole, whole) as inside, WeightSync(whole, [whole, alone]) as both:
        whole.update_actor(training_batch(), temperature=1.0)
        with pytest.raises(Refused, match="too old"):  # the worker has both, so it knows that a sync was forgotten
            gap(whole, whole)
        assert inside.sync() == inside.version == 1
        assert gap(whole, whole) < 1e-4
        assert (whole.rollout_version(), alone.rollout_version()) == (1, 0)
        whole.update_actor(training_batch(), temperature=1.0)
        assert both.sync() == 2
        assert (whole.rollout_version(), alone.rollout_version()) == (2, 2)
        assert gap(whole, whole) < 1e-4
        assert gap(whole, alone) < 1e-4
