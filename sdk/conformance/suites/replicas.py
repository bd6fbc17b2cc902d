"""Two replicas of a rollout that serves, behind one client, each in a process of its own, and a trainer that sends them
weights."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ClassVar

import attrs
import pytest

from core import RayClassWithInitArgs
from core.errors import Refused, WorkerFailed
from core.manifest import Capability
from core.rollout import SamplingParams
from manymesh.workers import (
    ActorRolloutRefConfig,
    ActorRolloutRefWorker,
    Role,
    RolloutClient,
    RolloutServerWorker,
    WeightSync,
)
from manymesh.workers.client import RequestFailed, Stream
from sdk.conformance.base import Session, offered
from sdk.conformance.suites.rollout_base import Models, child_processes, command, prompts, responses
from sdk.conformance.suites.worker_base import WorkerSuite, measure_disagreement, train

LENGTH = 900  # tokens of a response that takes a while
CONTEXT = 1024
FIRST, SECOND = "rank 0 of group 'first'", "rank 0 of group 'second'"


@attrs.frozen
class Cluster:
    trainer: Any
    replicas: list[Any]
    client: RolloutClient


class ClusterHolder:
    """One cluster for all tests; after one that has ended a replica the next test gets another."""

    def __init__(self, start: Callable[[], AbstractContextManager[Cluster]]) -> None:
        self._start_cluster, self._stack = start, ExitStack()
        self._cluster: Cluster | None = None

    def get(self) -> Cluster:
        if self._cluster is None:
            self._cluster = self._stack.enter_context(self._start_cluster())
        return self._cluster

    def close(self) -> None:
        self._cluster = None
        self._stack.close()


def read_until(stream: Stream, num_tokens: int) -> None:
    """Wait until so many tokens have come."""
    while len(stream.token_ids) < num_tokens:
        next(stream)


class ReplicaSuite(WorkerSuite):
    """What replicas and RolloutClient do together.

    Attributes:
        num_processes: how many processes a replica has at least below its worker's, which end with it.
    """

    num_processes: ClassVar[int] = 0

    @classmethod
    @contextmanager
    def start_cluster(cls, models: Models) -> Iterator[Cluster]:
        model = models.directory(1, max_position_embeddings=CONTEXT)
        trainer_config = ActorRolloutRefConfig(Role.ACTOR, cls.make_trainer_config(model))
        with cls.register_for_workers() as backend:
            replica = RayClassWithInitArgs(RolloutServerWorker, cls.make_rollout_config(backend, model))
            trainer = RayClassWithInitArgs(ActorRolloutRefWorker, trainer_config)
            with cls.start_groups(first=(1, replica), second=(1, replica), trainer=(1, trainer)) as groups:
                with ThreadPoolExecutor() as threads:
                    list(threads.map(lambda group: group.init_model(), groups.values()))
                replicas = [groups["first"], groups["second"]]
                yield Cluster(groups["trainer"], replicas, RolloutClient(replicas, timeout_s=60))

    @pytest.fixture(scope="class")
    @classmethod
    def holder(cls, conformance_session: Session) -> Iterator[ClusterHolder]:
        holder = ClusterHolder(lambda: cls.start_cluster(Models(conformance_session)))
        yield holder
        holder.close()

    @pytest.fixture
    def cluster(self, holder: ClusterHolder) -> Cluster:
        return holder.get()

    @pytest.fixture
    def doomed(self, holder: ClusterHolder) -> Iterator[Cluster]:
        """The same, for a test that ends a replica."""
        yield holder.get()
        holder.close()

    @property
    def long(self) -> SamplingParams:
        return self.greedy(LENGTH, ignore_eos=True)

    @offered(Capability.SERVER)
    def test_requests_are_spread_by_load_and_answers_are_in_their_order(self, cluster: Cluster) -> None:
        client, rows = cluster.client, [[5], [6, 7], [8], [9, 10, 11], [12], [13]]
        sampling = attrs.evolve(self.greedy(24, ignore_eos=True), num_samples=2, **self.seed(3))
        if sampling.seed is not None:
            sampling = attrs.evolve(sampling, temperature=1.0)
        streams = client.submit_all(rows, sampling)
        assert {stream.replica.name for stream in streams} == {FIRST, SECOND}
        assert max(client.loads.values()) - min(client.loads.values()) <= 27  # a prompt of three tokens, and 24
        have = [stream.result().token_ids for stream in reversed(streams)][::-1]
        assert set(client.loads.values()) == {0}
        assert have == responses(cluster.replicas[0].generate_sequences(prompts(*rows), sampling))

        long = client.submit([5], self.long)
        short = [client.submit([6], self.greedy(4, ignore_eos=True)) for _ in range(5)]
        assert {stream.replica.name for stream in short}.isdisjoint({long.replica.name})
        assert [len(next(short[0]).token_ids) > 0, long.finish_reason] == [True, None]
        long.abort()
        assert [stream.result().finish_reason for stream in (long, *short)] == ["abort", *["length"] * 5]
        assert len(long.token_ids) == len(long.log_probs) < LENGTH

    @offered(Capability.SERVER)
    def test_where_a_request_cannot_be_nothing_of_its_call_runs(self, cluster: Cluster) -> None:
        with pytest.raises(Refused):
            cluster.client.submit_all([[5], [6], [64]], self.long)
        assert set(cluster.client.loads.values()) == {0}
        with pytest.raises(Refused, match="no such replica"):
            cluster.replicas[0].poll_requests(1, "client")

    @offered(Capability.SERVER)
    def test_a_pause_holds_all_replicas_and_may_abort(self, cluster: Cluster) -> None:
        client = cluster.client
        streams = client.submit_all([[5], [6]], self.long)
        for stream in streams:
            read_until(stream, 5)
        client.pause("keep")
        impatient = RolloutClient(cluster.replicas, timeout_s=0.3).submit([7], self.greedy(24, ignore_eos=True))
        with pytest.raises(TimeoutError, match="paused"):
            impatient.result()
        client.resume_generation()
        assert [len(stream.result().token_ids) for stream in streams] == [LENGTH, LENGTH]
        streams = client.submit_all([[5], [6]], self.long)
        for stream in streams:
            read_until(stream, 5)
        client.pause("abort")
        assert [stream.result().finish_reason for stream in streams] == ["abort"] * 2
        client.resume_generation()

    @offered(Capability.SERVER)
    def test_a_trainers_weights_reach_all_replicas_in_the_midst_of_requests(self, cluster: Cluster) -> None:
        trainer, client, sampling = cluster.trainer, cluster.client, self.sampling_to_score()
        batch = prompts([1, 5, 6], [7])
        train(trainer, cluster.replicas[0].generate_sequences(batch, sampling), sampling.temperature)
        streams = client.submit_all([[5], [6]], self.long)
        for stream in streams:
            read_until(stream, 5)
        client.pause("keep")
        with WeightSync(trainer, cluster.replicas, kind="object_store", bucket_mb=0.05) as sync:
            assert sync.sync() == 1
        client.resume_generation()
        for stream in streams:
            [(old, num_old), (new, num_new)] = stream.result().weight_versions
            assert (old, new, num_old + num_new, stream.finish_reason) == (0, 1, LENGTH, "length")
        for replica in cluster.replicas:
            fresh = replica.generate_sequences(batch, sampling, min_version=1)
            assert measure_disagreement(trainer, fresh, sampling.temperature) < 1e-4

    @offered(Capability.SERVER)
    def test_a_dead_replicas_requests_fail_by_name_the_others_go_on_and_its_processes_end(
        self, doomed: Cluster
    ) -> None:
        client, (survivor, dying) = doomed.client, doomed.replicas
        streams = client.submit_all([[5], [6], [7], [8]], self.long)
        for stream in streams:
            read_until(stream, 2)
        [identity] = dying.identities
        processes = child_processes(identity.pid)
        assert len(processes) >= self.num_processes
        os.kill(identity.pid, signal.SIGKILL)
        failed_streams = []
        for stream in streams:
            if stream.replica.name == SECOND:
                with pytest.raises(RequestFailed, match=rf"{stream.request.id}[\s\S]*died[\s\S]*'second'") as failure:
                    stream.result()
                assert isinstance(failure.value.__cause__, WorkerFailed)
                assert 2 <= len(stream.token_ids) < LENGTH
                failed_streams.append(stream)
            else:
                assert (stream.result().finish_reason, len(stream.token_ids)) == ("length", LENGTH)
        assert len(failed_streams) == 2
        deadline = time.monotonic() + 10
        while (left := {pid: command(pid) for pid in processes if command(pid)}) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert left == {}, "processes that outlive their replica"
        assert client.check_health() == [SECOND]
        assert client.alive == [survivor]
        later = client.submit_all([[5], [6]], self.greedy(24, ignore_eos=True))
        assert [stream.result().replica.name for stream in later] == [FIRST] * 2
