"""One engine that serves: streams, aborts, pauses, and weights that change in the midst of requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict
from transformers import AutoModelForCausalLM

from core.batch import objects
from core.errors import Refused
from core.protocols import GenerationDelta, LogProbKind, Rollout, SamplingParams, WeightSpec
from manymesh_vllm.config import VllmRolloutConfig
from manymesh_vllm.server import VllmServer

pytestmark = pytest.mark.timeout(600)  # processes that load vLLM start slowly on a busy machine

MakePrompts = Callable[..., TensorDict]
Responses = Callable[[TensorDict], list[list[int]]]
RAGGED = ([1, 5, 6, 9, 30], [7], [40, 41, 42])
LONG = SamplingParams(temperature=0.0, max_new_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def directories(checkpoints: Callable[..., str]) -> list[str]:
    """Version v of the weights is in directories[v % 2]."""
    return [checkpoints(seed=seed, max_position_embeddings=1024) for seed in (1, 2)]


@pytest.fixture(scope="module")
def models(directories: list[str]) -> list[Any]:
    """The same, as transformers loads them."""
    return [AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32).eval() for each in directories]


@pytest.fixture(scope="module")
def server(directories: list[str]) -> Iterator[VllmServer]:
    config = VllmRolloutConfig(
        directories[0], max_model_len=512, max_num_seqs=32, max_num_batched_tokens=2048, kv_cache_mb=64
    )
    ready = VllmServer(config, device="cpu")
    ready.initialize()
    yield ready
    ready.shutdown()


def update(server: VllmServer, directories: list[str], version: int, num_buckets: int = 5) -> None:
    weights = list(load_file(f"{directories[version % 2]}/model.safetensors").items())
    server.begin_weight_update([WeightSpec(name, tuple(t.shape), "float32") for name, t in weights], version)
    assert server.weight_version is None
    for i in range(num_buckets):
        server.load_bucket(weights[i::num_buckets])
    server.finish_weight_update()
    assert server.weight_version == version


@torch.no_grad()
def log_probs(model: Any, ids: list[int]) -> torch.Tensor:
    """(tokens - 1, vocab): of what follows each token."""
    logits: torch.Tensor = model(torch.tensor([ids])).logits
    return logits[0, :-1].float().log_softmax(-1)


async def all_of(deltas: AsyncIterator[GenerationDelta]) -> list[GenerationDelta]:
    return [delta async for delta in deltas]


def joined(deltas: list[GenerationDelta]) -> tuple[list[int], list[float]]:
    return [t for delta in deltas for t in delta.token_ids], [v for delta in deltas for v in delta.log_probs]


async def begun(stream: AsyncIterator[GenerationDelta], num_tokens: int) -> list[GenerationDelta]:
    """Deltas until so many tokens have come."""
    deltas: list[GenerationDelta] = []
    while len(joined(deltas)[0]) < num_tokens:
        deltas.append(await anext(stream))
    return deltas


def is_greedy(model: Any, prompt: list[int], tokens: list[int], values: list[float], first: int = 0) -> bool:
    """Whether tokens[first:] are the model's greedy choices behind what precedes them, with these log-probs."""
    table = log_probs(model, [*prompt, *tokens])[len(prompt) - 1 :]
    at = torch.tensor(tokens)
    chosen = table.gather(1, at[:, None])[:, 0]
    near = (chosen - torch.tensor(values)).abs()[first:] < 1e-4
    return bool(near.all()) and bool((chosen - table.max(1).values)[first:].abs().max() < 1e-4)


def test_it_is_a_rollout_of_the_contract(server: VllmServer) -> None:
    assert isinstance(server, Rollout)


def test_greedy_rows_are_those_of_transformers_before_and_after_updates(
    server: VllmServer, models: list[Any], directories: list[str], prompts: MakePrompts, responses: Responses
) -> None:
    first = server.weight_version or 0
    for version in (first, first + 1, first + 2):
        if version > first:
            update(server, directories, version)
        out = server.generate(prompts(*RAGGED), SamplingParams(temperature=0.0, max_new_tokens=12))
        assert out["weight_version"].tolist() == [version] * 3
        for row, tokens, values, mask in zip(
            RAGGED, responses(out), out["rollout_log_probs"].unbind(), out["response_mask"].unbind(), strict=True
        ):
            assert is_greedy(models[version % 2], row, tokens, values[mask].tolist())


def test_an_update_in_the_midst_of_requests_says_which_weights_sampled_which_tokens(
    server: VllmServer, models: list[Any], directories: list[str]
) -> None:
    old = server.weight_version or 0
    prompt = [1, 5, 6]

    async def go() -> list[GenerationDelta]:
        async with aclosing(server.submit(prompt, LONG)) as stream:  # type: ignore[type-var]
            deltas = await begun(stream, 20)
            await asyncio.to_thread(update, server, directories, old + 1)
            return deltas + await all_of(stream)

    deltas = asyncio.run(go())
    tokens, values = joined(deltas)
    assert (len(tokens), deltas[-1].finish_reason) == (400, "length")
    versions = [delta.weight_version for delta in deltas for _ in delta.token_ids]
    num_old = versions.count(old)
    assert versions == [old] * num_old + [old + 1] * (400 - num_old)
    assert 20 <= num_old < 400
    assert is_greedy(models[old % 2], prompt, tokens[:num_old], values[:num_old])
    assert is_greedy(models[(old + 1) % 2], prompt, tokens, values, first=num_old)


def test_rows_that_an_update_comes_upon_have_their_oldest_version_and_its_spans(
    server: VllmServer, directories: list[str], prompts: MakePrompts, responses: Responses
) -> None:
    old = server.weight_version or 0
    updating = threading.Timer(0.3, update, (server, directories, old + 1))
    updating.start()
    out = server.generate(prompts([5, 6], [7]), attrs.evolve(LONG, num_samples=2, temperature=1.0))
    updating.join()
    spans = objects(out.get("weight_versions"))
    assert out["weight_version"].tolist() == [old] * 4
    for row, tokens in zip(spans, responses(out), strict=True):
        assert [version for version, _ in row] == [old, old + 1]
        assert sum(number for _, number in row) == len(tokens)
    fresh = server.generate(prompts([5, 6]), SamplingParams(max_new_tokens=3, ignore_eos=True))
    assert objects(fresh.get("weight_versions")) == [[(old + 1, 3)]]


def test_an_aborted_request_keeps_what_it_has(server: VllmServer, models: list[Any], prompts: MakePrompts) -> None:
    prompt = [40, 41]

    async def go() -> tuple[list[GenerationDelta], list[GenerationDelta]]:
        stream, other = server.submit(prompt, LONG, request_id="one"), server.submit([7], LONG)
        deltas, others = await begun(stream, 10), await begun(other, 1)
        await server.abort(["one", "unknown"])
        return deltas + await all_of(stream), others + await all_of(other)

    deltas, others = asyncio.run(go())
    tokens, values = joined(deltas)
    assert {delta.request_id for delta in deltas} == {"one"}
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == "abort"
    assert 10 <= len(tokens) < 400
    assert is_greedy(models[(server.weight_version or 0) % 2], prompt, tokens, values)
    assert (others[-1].finish_reason, len(joined(others)[0])) == ("length", 400)

    aborting = threading.Timer(0.3, lambda: asyncio.run(server.abort()))
    aborting.start()
    out = server.generate(prompts([5, 6]), attrs.evolve(LONG, max_new_tokens=500))
    assert objects(out.get("finish_reason")) == ["abort"]
    assert 2 < len(out["input_ids"].values()) < 502


def test_an_abort_finds_a_request_that_has_only_just_begun(server: VllmServer) -> None:
    async def go() -> list[GenerationDelta]:
        row = asyncio.ensure_future(all_of(server.submit([40, 41], LONG)))
        await asyncio.sleep(0)
        await server.abort()
        return await row

    deltas = asyncio.run(go())
    assert (deltas[-1].finish_reason, len(joined(deltas)[0]) < 100) == ("abort", True)

    async def unread() -> None:
        stream = server.submit([40, 41], attrs.evolve(LONG, max_new_tokens=20))
        await anext(stream)
        await asyncio.sleep(0.5)  # it has ended, and nobody reads
        await asyncio.wait_for(server.abort(), 10)
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(unread())


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_pause_keeps_awaits_or_aborts_what_runs_and_new_requests_wait(server: VllmServer, mode: Any) -> None:
    async def go() -> tuple[list[GenerationDelta], list[GenerationDelta], bool]:
        stream = server.submit([9], LONG)
        deltas = await begun(stream, 5)
        await server.pause(mode)
        late = asyncio.ensure_future(all_of(server.submit([8], attrs.evolve(LONG, max_new_tokens=4))))
        rest = asyncio.ensure_future(all_of(stream))
        await asyncio.sleep(0.5)
        ended = rest.done()
        assert not late.done()
        await server.resume_generation()
        return deltas + await rest, await late, ended

    deltas, late, ended = asyncio.run(go())
    tokens, _ = joined(deltas)
    assert (deltas[-1].finish_reason, ended) == {
        "keep": ("length", False),
        "wait": ("length", True),
        "abort": ("abort", True),
    }[mode]
    assert (len(tokens) == 400) == (mode != "abort")
    assert (late[-1].finish_reason, len(joined(late)[0])) == ("length", 4)


def test_a_stream_that_is_closed_ends_its_request(server: VllmServer) -> None:
    async def go() -> int:
        stream = server.submit([9], LONG)
        await begun(stream, 1)
        await stream.aclose()  # type: ignore[attr-defined]
        assert server._engine is not None
        return server._engine.llm.output_processor.get_num_unfinished_requests()

    assert asyncio.run(go()) == 0


def test_each_request_has_log_probs_of_its_own_kind_whatever_runs_beside_it(
    server: VllmServer, models: list[Any]
) -> None:
    kinds = [*LogProbKind, LogProbKind.RAW]
    options = {"temperature": 0.6, "max_new_tokens": 30, "ignore_eos": True}
    asked = [SamplingParams(top_k=5, seed=3, log_probs=kind, **options) for kind in kinds[:3]]
    asked.append(SamplingParams(temperature=0.0, max_new_tokens=30, ignore_eos=True, log_probs=LogProbKind.PROCESSED))

    async def go() -> list[list[GenerationDelta]]:
        return await asyncio.gather(*(all_of(server.submit([5, 6], each)) for each in asked))

    rows = [joined(deltas) for deltas in asyncio.run(go())]
    assert rows[0][0] == rows[1][0] == rows[2][0]
    table = log_probs(models[(server.weight_version or 0) % 2], [5, 6, *rows[0][0]])[1:]
    tempered = (table / 0.6).log_softmax(-1)
    kept = tempered.where(tempered >= tempered.topk(5).values[:, -1:], -torch.inf)
    want = {LogProbKind.RAW: table, LogProbKind.TEMPERATURE: tempered, LogProbKind.PROCESSED: kept.log_softmax(-1)}
    at = torch.tensor(rows[0][0])[:, None]
    for kind, (_, values) in zip(kinds[:3], rows[:3], strict=True):
        assert (want[kind].gather(1, at)[:, 0] - torch.tensor(values)).abs().max() < 1e-4
    assert rows[3][1] == [0.0] * 30


def test_rows_come_in_order_whichever_ends_first_and_a_seeds_rows_dont_depend_on_their_batch(
    server: VllmServer, prompts: MakePrompts, responses: Responses
) -> None:
    sampling = SamplingParams(num_samples=3, max_new_tokens=60, seed=4)
    out = server.generate(prompts([5], [6], [7], prompt_id=[30, 10, 20]), sampling)
    assert out["prompt_id"].tolist() == [30] * 3 + [10] * 3 + [20] * 3
    assert [int(ids[0]) for ids in out["input_ids"].unbind()] == [5] * 3 + [6] * 3 + [7] * 3
    assert len({len(row) for row in responses(out)}) > 1
    alone = server.generate(prompts([6], prompt_id=[10]), sampling)
    assert responses(alone) == responses(out)[3:6]

    async def one() -> list[GenerationDelta]:
        return await all_of(server.submit([6], attrs.evolve(sampling, num_samples=1), prompt_id=10, sample=2))

    assert joined(asyncio.run(one()))[0] == responses(out)[5]


def test_unseeded_rows_differ(server: VllmServer, prompts: MakePrompts, responses: Responses) -> None:
    out = responses(server.generate(prompts([5]), SamplingParams(num_samples=4, max_new_tokens=12)))
    assert len({tuple(row) for row in out}) == 4


def test_an_update_of_which_nothing_came_leaves_requests_as_they_were_and_one_in_part_ends_them(
    server: VllmServer, directories: list[str], models: list[Any], prompts: MakePrompts
) -> None:
    old = server.weight_version or 0
    weights = list(load_file(f"{directories[(old + 1) % 2]}/model.safetensors").items())
    specs = [WeightSpec(name, tuple(t.shape), "float32") for name, t in weights]

    async def go(num_loaded: int) -> list[GenerationDelta]:
        stream = server.submit([9], LONG)
        deltas = await begun(stream, 5)

        def in_part() -> None:
            server.begin_weight_update(specs, old + 1)
            for pair in weights[:num_loaded]:
                server.load_bucket([pair])
            server.abort_weight_update()

        await asyncio.to_thread(in_part)
        return deltas + await asyncio.wait_for(all_of(stream), 60)

    whole = asyncio.run(go(0))
    assert (whole[-1].finish_reason, server.weight_version) == ("length", old)
    assert is_greedy(models[old % 2], [9], *joined(whole))
    assert asyncio.run(go(3))[-1].finish_reason == "abort"
    assert server.weight_version is None
    with pytest.raises(Refused, match="no valid weights"):
        server.submit([9], LONG)
    with pytest.raises(Refused, match="no valid weights"):
        asyncio.run(server.resume_generation())
    with pytest.raises(Refused, match="missing"):
        server.begin_weight_update(specs[:-1], old + 1)
    server.begin_weight_update(specs, old + 2)
    server.load_bucket(weights[:2])
    with pytest.raises(Refused, match="have not come"):
        server.finish_weight_update()
    with pytest.raises(Refused, match="came before"):
        server.load_bucket(weights[:1])
    update(server, directories, old + 2)
    out = server.generate(prompts([9]), SamplingParams(max_new_tokens=4), min_version=old + 2)
    assert out["weight_version"].tolist() == [old + 2]


def test_what_cannot_be_asked_is_refused_before_it_runs(server: VllmServer, prompts: MakePrompts) -> None:
    with pytest.raises(Refused, match="one response"):
        server.submit([5], SamplingParams(num_samples=2))
    with pytest.raises(Refused, match="leaves no room"):
        server.submit([5] * 500, SamplingParams(max_new_tokens=50))
    with pytest.raises(Refused, match="prompt is empty"):
        server.submit([], SamplingParams())
    with pytest.raises(Refused, match="so low a temperature"):
        server.submit([5], SamplingParams(temperature=0.001))
    with pytest.raises(Refused, match="need a tokenizer"):
        server.submit([5], SamplingParams(stop=("a",)))
    with pytest.raises(Refused, match="unknown mode"):
        asyncio.run(server.pause("sleep"))  # type: ignore[arg-type]
    with pytest.raises(Refused, match="frees nothing on CPU"):
        server.release(["weights"])
    asyncio.run(server.pause("keep"))
    with pytest.raises(Refused, match="is paused"):
        server.generate(prompts([5]), SamplingParams())
    asyncio.run(server.resume_generation())
    asyncio.run(server.check_health())
