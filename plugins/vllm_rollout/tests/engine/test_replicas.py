"""Two replicas behind one client, each a Ray actor with an engine process, and a trainer that sends them weights."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import attrs
import psutil
import pytest
import ray
import torch
from tensordict import TensorDict

from core import LossSpec, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from core.errors import Refused, WorkerFailed
from core.rollout import SamplingParams
from manymesh.workers import (
    ActorRolloutRefConfig,
    ActorRolloutRefWorker,
    RolloutClient,
    RolloutServerWorker,
    RolloutWorkerConfig,
    TrainingWorkerConfig,
    WeightSync,
)
from manymesh.workers.client import RequestFailed, Stream
from sdk.conformance.suites.rollout_base import Models, prompts

pytestmark = pytest.mark.timeout(600)  # processes that load vLLM start slowly on a busy machine

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
LONG = attrs.evolve(GREEDY, max_new_tokens=900)


@attrs.frozen
class Cluster:
    trainer: Any
    replicas: list[Any]
    client: RolloutClient


@pytest.fixture(scope="module")
def cluster(models: Models) -> Iterator[Cluster]:
    model = models.directory(1, max_position_embeddings=1024)
    config = RolloutWorkerConfig(
        backend="vllm_server",
        engine={"model": model, "max_num_seqs": 16, "max_num_batched_tokens": 1024, "kv_cache_mb": 32},
    )
    trainer_config = ActorRolloutRefConfig(
        role="actor",  # type: ignore[arg-type]
        actor=TrainingWorkerConfig(
            backend="fsdp",
            engine={"model": model, "optimizer": {"lr": 1e-2}},
            loss=LossSpec("manymesh.recipes.grpo.loss:policy_loss"),
        ),
    )
    ray.init(num_cpus=3, num_gpus=0, include_dashboard=False, log_to_driver=False, configure_logging=False)
    environment = {"OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    workers = [RayClassWithInitArgs(RolloutServerWorker, config) for _ in range(2)]
    workers.append(RayClassWithInitArgs(ActorRolloutRefWorker, trainer_config))
    with ExitStack() as stack:
        stack.callback(ray.shutdown)
        groups = []
        for name, worker in zip(("a", "b", "trainer"), workers, strict=True):
            pool = stack.enter_context(RayResourcePool([1]))
            groups.append(stack.enter_context(RayWorkerGroup(pool, worker, name=name, env=environment)))
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda group: group.init_model(), groups))
        yield Cluster(groups[2], groups[:2], RolloutClient(groups[:2], timeout_s=60))


def response(batch: TensorDict) -> list[list[int]]:
    columns = (batch[name].unbind() for name in ("input_ids", "response_mask"))
    return [ids[mask].tolist() for ids, mask in zip(*columns, strict=True)]


def test_requests_are_spread_by_load_and_answers_are_in_their_order(cluster: Cluster) -> None:
    client, rows = cluster.client, [[5], [6, 7], [8], [9, 10, 11], [12], [13]]
    sampling = attrs.evolve(GREEDY, num_samples=2, temperature=1.0, seed=3)
    streams = client.submit_all(rows, sampling)
    assert {stream.replica.name for stream in streams} == {"rank 0 of group 'a'", "rank 0 of group 'b'"}
    assert max(client.loads.values()) - min(client.loads.values()) <= 27
    have = [stream.result().token_ids for stream in reversed(streams)][::-1]
    assert set(client.loads.values()) == {0}
    alone = cluster.replicas[0].generate_sequences(prompts(*rows), sampling)
    assert have == response(alone)

    long = client.submit([5], LONG)
    short = [client.submit([6], attrs.evolve(GREEDY, max_new_tokens=4)) for _ in range(5)]
    assert {stream.replica.name for stream in short}.isdisjoint({long.replica.name})
    assert [len(next(short[0]).token_ids) > 0, long.finish_reason] == [True, None]
    long.abort()
    assert [stream.result().finish_reason for stream in (long, *short)] == ["abort", *["length"] * 5]
    assert len(long.token_ids) == len(long.log_probs) < 900


def test_a_request_that_cannot_be_is_refused_and_nothing_of_its_call_runs(cluster: Cluster) -> None:
    with pytest.raises(Refused, match="doesn't know"):
        cluster.client.submit_all([[5], [6], [64]], LONG)
    assert set(cluster.client.loads.values()) == {0}
    with pytest.raises(Refused, match="no such replica"):
        cluster.replicas[0].poll_requests(1, "client")


def read_until(stream: Stream, num_tokens: int) -> None:
    while len(stream.token_ids) < num_tokens:
        next(stream)


def test_a_pause_holds_all_replicas_and_may_abort(cluster: Cluster) -> None:
    client = cluster.client
    streams = client.submit_all([[5], [6]], LONG)
    for stream in streams:
        read_until(stream, 5)
    client.pause("keep")
    impatient = RolloutClient(cluster.replicas, timeout_s=0.3).submit([7], GREEDY)
    with pytest.raises(TimeoutError, match="paused"):
        impatient.result()
    client.resume_generation()
    assert [len(stream.result().token_ids) for stream in streams] == [900, 900]
    aborted = client.submit_all([[5], [6]], LONG)
    for stream in aborted:
        read_until(stream, 5)
    client.pause("abort")
    assert [stream.result().finish_reason for stream in aborted] == ["abort"] * 2
    client.resume_generation()


def test_a_trainers_weights_reach_all_replicas_in_the_midst_of_requests(cluster: Cluster) -> None:
    trainer, client = cluster.trainer, cluster.client
    sampling = SamplingParams(num_samples=4, max_new_tokens=12, temperature=0.7, seed=3)
    batch = cluster.replicas[0].generate_sequences(prompts([1, 5, 6], [7]), sampling)
    batch["old_log_probs"] = trainer.compute_log_prob(batch, sampling.temperature)["old_log_probs"]
    signs = torch.linspace(-1, 1, batch["response_mask"].values().numel())
    batch["advantages"] = torch.nested.nested_tensor_from_jagged(signs, batch["response_mask"].offsets())
    trainer.update_actor(batch, temperature=sampling.temperature)
    streams = client.submit_all([[5], [6]], LONG)
    for stream in streams:
        read_until(stream, 5)
    client.pause("keep")
    with WeightSync(trainer, cluster.replicas, kind="object_store", bucket_mb=0.05) as sync:
        assert sync.sync() == 1
    client.resume_generation()
    for stream in streams:
        [(old, num_old), (new, num_new)] = stream.result().weight_versions
        assert (old, new, num_old + num_new, stream.finish_reason) == (0, 1, 900, "length")
    for replica in cluster.replicas:
        fresh = replica.generate_sequences(prompts([1, 5, 6], [7]), sampling, min_version=1)
        scores = trainer.compute_log_prob(fresh, sampling.temperature)["old_log_probs"]
        columns = scores, fresh["rollout_log_probs"], fresh["response_mask"]
        ours, theirs, mask = (column.values() for column in columns)
        assert (ours - theirs)[mask].abs().max() < 1e-4


def test_a_dead_replicas_requests_fail_by_name_the_others_go_on_and_its_engine_ends(cluster: Cluster) -> None:
    client, (_, doomed) = cluster.client, cluster.replicas
    streams = client.submit_all([[5], [6], [7], [8]], LONG)
    for stream in streams:
        read_until(stream, 2)
    [identity] = doomed.identities
    engines = [
        each for each in psutil.Process(identity.pid).children(recursive=True) if "python" in each.name().lower()
    ]
    assert engines
    os.kill(identity.pid, signal.SIGKILL)
    finished_streams = []
    for stream in streams:
        if "'b'" in stream.replica.name:
            with pytest.raises(RequestFailed, match=rf"{stream.request.id}[\s\S]*died[\s\S]*group 'b'") as failure:
                stream.result()
            assert isinstance(failure.value.__cause__, WorkerFailed)
            assert 2 <= len(stream.token_ids) < 900
            finished_streams.append(stream)
        else:
            assert (stream.result().finish_reason, len(stream.token_ids)) == ("length", 900)
    assert len(finished_streams) == 2
    dead, alive = psutil.wait_procs(engines, timeout=10)
    assert (len(dead), alive) == (len(engines), [])
    assert client.check_health() == ["rank 0 of group 'b'"]
    assert client.alive == cluster.replicas[:1]
    assert [stream.result().replica.name for stream in client.submit_all([[5], [6]], GREEDY)] == [
        "rank 0 of group 'a'"
    ] * 2
