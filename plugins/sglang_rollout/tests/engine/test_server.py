"""What the server alone has: three uploads of weights, servers that somebody else runs, and their faults."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import psutil
import pytest
import torch

from core.errors import DeadlineExceeded, ManymeshError, Refused
from core.rollout import GenerationDelta, SamplingParams
from manymesh_sglang.config import SglangServerConfig
from manymesh_sglang.server_engine import SglangServerEngine
from manymesh_sglang.server_rollout import SglangServerRollout
from manymesh_sglang.weight_upload import DistributedUpload, TensorUpload
from sdk.conformance.suites.rollout_base import Models, greedy_error, prompts, rows_of, specs, update
from sdk.conformance.suites.rollout_server import all_of, read_until, tokens_of

pytestmark = pytest.mark.timeout(900)  # processes that load SGLang start slowly on a busy machine

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
LONG = attrs.evolve(GREEDY, max_new_tokens=400)


def made(model: str, **options: Any) -> SglangServerRollout:
    small = {"max_num_seqs": 32, "kv_cache_tokens": 4096, "update_timeout_s": 60.0}
    return SglangServerRollout(SglangServerConfig(model, **(small | options)), device="cpu")


@pytest.fixture(scope="module")
def server(models: Models) -> Iterator[SglangServerRollout]:
    ready = made(models.directory(1), weights="tensor")
    ready.initialize()
    yield ready
    ready.shutdown()


def inside(server: SglangServerRollout) -> SglangServerEngine:
    engine = server._engine
    assert isinstance(engine, SglangServerEngine)
    return engine


def of_another(server: SglangServerRollout, models: Models, **options: Any) -> SglangServerRollout:
    """A rollout over the same server, which it takes for somebody else's."""
    client = inside(server)._client
    options = {"api_key": client.key, "addresses": (client.address,)} | options
    return made(models.directory(1), **options)


@pytest.mark.parametrize("way", ["tensor", "distributed", "disk"])
def test_greedy_rows_are_those_of_transformers_before_and_after_three_updates_by_each_way(
    server: SglangServerRollout, models: Models, way: str, tmp_path: Path
) -> None:
    if way == "tensor":
        update(server, models.weights(1), 0)
        rollout = server
    else:
        update(server, models.weights(1), 0)
        options = {"weights_dir": str(tmp_path)} if way == "disk" else {}
        rollout = of_another(server, models, weights=way, **options)
        rollout.initialize()
    for version in range(4):
        if version:
            update(rollout, models.weights(1 + version % 2), version)
        out = rollout.generate(prompts([5, 6, 7], [9], [40, 41]), GREEDY)
        model = models.reference(1 + version % 2)
        assert max(greedy_error(model, row) for row in rows_of(out)) < 1e-4
        assert out["weight_version"].tolist() == [version] * 3
    if rollout is not server:
        rollout.shutdown()
        assert list(tmp_path.iterdir()) == []
        asyncio.run(server.check_health())  # it is somebody else's, and lives on
        server.generate(prompts([5]), GREEDY)


def test_a_wrong_key_is_refused(server: SglangServerRollout, models: Models) -> None:
    with pytest.raises(Refused, match=r"doesn't take the key[\s\S]*api_key"):
        of_another(server, models, api_key="wrong").initialize()
    with pytest.raises(Refused, match="doesn't take the key"):
        of_another(server, models, api_key=None).initialize()


def test_weights_of_another_model_are_refused_and_nothing_has_changed(
    server: SglangServerRollout, models: Models
) -> None:
    update(server, models.weights(1), 7)
    other = models.weights(1, num_layers=1)
    with pytest.raises(Refused, match=r"13 matched, 11 missing|missing \[.*layers\.1\."):
        server.begin_weight_update(specs(other), 8)
    assert server.weight_version == 7
    [row] = rows_of(server.generate(prompts([5]), GREEDY))
    assert greedy_error(models.reference(1), row) < 1e-4


@pytest.mark.parametrize("kind", [TensorUpload, DistributedUpload])
def test_a_refused_bucket_is_an_error_and_leaves_no_sender_waiting(
    server: SglangServerRollout, models: Models, kind: type
) -> None:
    """SGLang answers success: false, at once, to tensors outside of an update."""
    engine, weights = inside(server), models.weights(2)
    options: dict[str, Any] = {"host": "127.0.0.1", "backend": "gloo", "device": torch.device("cpu")}
    upload = kind(engine._client, 60, **(options if kind is DistributedUpload else {}))

    async def go() -> None:
        await upload.begin()
        await upload.end()
        await asyncio.wait_for(upload.load(list(weights.items())[:3]), 30)

    with pytest.raises(ManymeshError, match=r"did not take the weights[\s\S]*begin_weight_update"):
        engine.call(go())
    update(server, weights, 9)
    [row] = rows_of(server.generate(prompts([5]), GREEDY))
    assert greedy_error(models.reference(2), row) < 1e-4
    engine.call(upload.close())


def test_a_failed_bucket_leaves_no_valid_weights_until_all_are_sent_again(
    server: SglangServerRollout, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = models.weights(2)

    async def refused(bucket: Sequence[Any]) -> None:
        raise ManymeshError("no")

    server.begin_weight_update(specs(weights), 3)
    server.load_bucket(list(weights.items())[:2])
    with monkeypatch.context() as patched:
        patched.setattr(inside(server)._upload, "load", refused)
        with pytest.raises(ManymeshError, match="no"):
            server.load_bucket(list(weights.items())[2:4])
    server.abort_weight_update()
    assert server.weight_version is None
    with pytest.raises(Refused, match="no valid weights"):
        server.generate(prompts([5]), GREEDY)
    update(server, weights, 4)
    assert server.generate(prompts([5]), GREEDY, min_version=4)["weight_version"].tolist() == [4]


def test_an_update_in_the_midst_of_requests_says_which_weights_sampled_which_tokens(
    server: SglangServerRollout, models: Models
) -> None:
    update(server, models.weights(1), 11)

    async def go() -> list[GenerationDelta]:
        stream = server.submit([1, 5, 6], LONG)
        deltas = await read_until(stream, 20)
        await asyncio.to_thread(update, server, models.weights(2), 12)
        return deltas + await all_of(stream)

    deltas = asyncio.run(go())
    versions = [delta.weight_version for delta in deltas for _ in delta.token_ids]
    assert (len(versions), sorted(set(versions)), versions) == (400, [11, 12], sorted(versions))
    assert len(tokens_of(deltas)) == 400


def test_requests_whose_names_begin_alike_are_aborted_one_by_one(server: SglangServerRollout, models: Models) -> None:
    update(server, models.weights(1), 0)

    async def go() -> tuple[list[GenerationDelta], list[GenerationDelta]]:
        one, other = server.submit([9], LONG, request_id="a-1"), server.submit([7], LONG, request_id="a-12")
        first, second = await read_until(one, 5), await read_until(other, 5)
        await server.abort(["a-1"])
        return first + await all_of(one), second + await all_of(other)

    aborted, whole = asyncio.run(go())
    assert aborted[-1].finish_reason == "abort"
    assert (whole[-1].finish_reason, len(tokens_of(whole))) == ("length", 400)


def test_a_request_that_waits_for_a_pause_to_end_can_be_aborted(server: SglangServerRollout, models: Models) -> None:
    update(server, models.weights(1), 0)

    async def go() -> list[GenerationDelta]:
        await server.pause("keep")
        waiting = asyncio.ensure_future(all_of(server.submit([9], LONG, request_id="late")))
        await asyncio.sleep(0.2)
        await server.abort(["late"])
        deltas = await asyncio.wait_for(waiting, 30)
        await server.resume_generation()
        return deltas

    assert asyncio.run(go()) == [GenerationDelta("late", (), (), 0, "abort")]


def test_a_dead_servers_requests_end_with_a_named_error_and_a_new_server_serves_again(models: Models) -> None:
    server = made(models.directory(1))
    server.initialize()
    process = inside(server)._process
    assert process is not None
    below = psutil.Process(process.pid).children(recursive=True)
    scheduler = next(each for each in below if "scheduler" in " ".join(each.cmdline()))

    async def go() -> None:
        stream = server.submit([9], LONG, request_id="doomed")
        await read_until(stream, 5)
        os.kill(scheduler.pid, signal.SIGKILL)
        await asyncio.wait_for(all_of(stream), 120)

    with pytest.raises(ManymeshError, match=r"'doomed'[\s\S]*(ended by|exit code)|broke off"):
        asyncio.run(go())
    with pytest.raises(ManymeshError, match=r"died|cannot be asked"):
        asyncio.run(server.check_health())
    with pytest.raises(ManymeshError):
        server.generate(prompts([5]), GREEDY)
    with pytest.raises(ManymeshError):
        update(server, models.weights(2), 1)
    assert server.weight_version is None
    server.shutdown()
    assert psutil.wait_procs(below, timeout=30)[1] == []
    server.initialize()
    [row] = rows_of(server.generate(prompts([5]), GREEDY))
    assert greedy_error(models.reference(1), row) < 1e-4
    server.shutdown()


def test_a_server_that_does_not_come_is_an_error_with_the_last_lines_of_its_log(models: Models) -> None:
    with pytest.raises(DeadlineExceeded, match=r"not ready after 0\.5 s[\s\S]*last lines"):
        made(models.directory(1), start_timeout_s=0.5).initialize()
    with pytest.raises(Refused, match=r"cannot run[\s\S]*exit code[\s\S]*no_such_option"):
        made(models.directory(1), sglang={"no_such_option": 1}).initialize()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        with pytest.raises(Refused, match="taken"):
            made(models.directory(1), port=listener.getsockname()[1]).initialize()


def test_a_server_does_not_outlive_a_worker_that_is_killed(models: Models) -> None:
    """Also one that is still on its way, and whose starting thread has ended."""
    code = (
        "import sys, threading, time\n"
        "from manymesh_sglang.server_process import ServerProcess\n"
        f"start = lambda: print(ServerProcess({{'model_path': {models.directory(1)!r}}}, {{}}, 0).pid, flush=True)\n"
        "thread = threading.Thread(target=start); thread.start(); thread.join(); time.sleep(600)"
    )
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    child = psutil.Process(int(worker.stdout.readline()))
    psutil.wait_procs([child], timeout=2)
    assert child.is_running()
    worker.kill()
    worker.wait()
    assert psutil.wait_procs([child], timeout=60)[1] == []
