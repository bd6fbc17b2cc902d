"""What is the server's own: requests that end with their readers, and updates that fail in their midst."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from core.errors import Refused
from core.rollout import GenerationDelta, SamplingParams
from manymesh_vllm.config import VllmServerConfig
from manymesh_vllm.server_rollout import VllmServerRollout
from sdk.conformance.suites.rollout_base import Models, chosen_error, prompts, specs, update
from sdk.conformance.suites.rollout_server import all_of, log_probs_in, read_until, tokens_of

pytestmark = pytest.mark.timeout(600)  # processes that load vLLM start slowly on a busy machine

LONG = SamplingParams(temperature=0.0, max_new_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def server(models: Models) -> Iterator[VllmServerRollout]:
    config = VllmServerConfig(models.directory(1), max_num_seqs=32, max_num_batched_tokens=2048, kv_cache_mb=64)
    ready = VllmServerRollout(config, device="cpu")
    ready.initialize()
    yield ready
    ready.shutdown()


def test_an_abort_passes_over_a_request_that_has_ended_unread(server: VllmServerRollout) -> None:
    async def go() -> None:
        stream = server.submit([40, 41], attrs.evolve(LONG, max_new_tokens=20))
        await anext(stream)
        await asyncio.sleep(0.5)  # it has ended, and nobody reads
        await asyncio.wait_for(server.abort(), 30)
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(go())


def test_a_stream_that_is_closed_ends_its_request(server: VllmServerRollout) -> None:
    async def go() -> int:
        stream = server.submit([9], LONG)
        await read_until(stream, 1)
        await stream.aclose()  # type: ignore[attr-defined]
        engine: Any = server._engine
        unfinished: int = engine.llm.output_processor.get_num_unfinished_requests()
        return unfinished

    assert asyncio.run(go()) == 0


def test_an_update_of_which_nothing_came_leaves_requests_as_they_were_and_one_in_part_ends_them(
    server: VllmServerRollout, models: Models
) -> None:
    update(server, models.weights(1), 3)
    weights = models.weights(2)

    async def go(num_loaded: int) -> list[GenerationDelta]:
        stream = server.submit([9], LONG)
        deltas = await read_until(stream, 5)

        def in_part() -> None:
            server.begin_weight_update(specs(weights), 4)
            for pair in list(weights.items())[:num_loaded]:
                server.load_bucket([pair])
            server.abort_weight_update()

        await asyncio.to_thread(in_part)
        return deltas + await asyncio.wait_for(all_of(stream), 60)

    whole = asyncio.run(go(0))
    assert (whole[-1].finish_reason, server.weight_version) == ("length", 3)
    assert chosen_error(models.reference(1), [9], tokens_of(whole), log_probs_in(whole)) < 1e-4
    assert asyncio.run(go(3))[-1].finish_reason == "abort"
    assert server.weight_version is None
    update(server, weights, 5)
    out = server.generate(prompts([9]), SamplingParams(max_new_tokens=4), min_version=5)
    assert out["weight_version"].tolist() == [5]


def test_what_it_cannot_do_is_refused(server: VllmServerRollout) -> None:
    with pytest.raises(Refused, match="so low a temperature"):
        server.submit([5], SamplingParams(temperature=0.001))
    asyncio.run(server.pause("keep"))
    with pytest.raises(Refused, match="is paused"):
        server.generate(prompts([5]), SamplingParams())
    asyncio.run(server.resume_generation())
