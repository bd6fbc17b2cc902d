"""A rollout that is a server: streams, aborts, pauses, and weights that change while requests run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import attrs
import pytest
import torch

from core.batch import objects
from core.errors import Refused
from core.manifest import Capability
from core.rollout import GenerationDelta, PauseMode, RolloutServer, SamplingParams
from sdk.conformance.base import offered
from sdk.conformance.suites.rollout_base import (
    CONTEXT,
    RolloutSuite,
    buckets,
    chosen_error,
    prompts,
    responses,
    specs,
    update,
)
from sdk.conformance.suites.rollout_sampling import log_probs_of

LENGTH = 400  # tokens of a response that takes a while
WAIT_S = 60.0


async def all_of(deltas: AsyncIterator[GenerationDelta]) -> list[GenerationDelta]:
    return [delta async for delta in deltas]


async def read_until(stream: AsyncIterator[GenerationDelta], num_tokens: int) -> list[GenerationDelta]:
    """Deltas until so many tokens have come."""
    deltas: list[GenerationDelta] = []
    while len(tokens_of(deltas)) < num_tokens:
        deltas.append(await anext(stream))
    return deltas


def tokens_of(deltas: Sequence[GenerationDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def log_probs_in(deltas: Sequence[GenerationDelta]) -> list[float]:
    return [value for delta in deltas for value in delta.log_probs]


class ServerSuite(RolloutSuite):
    @property
    def endless(self) -> SamplingParams:
        return self.greedy(LENGTH, ignore_eos=True)

    def run(self, coroutine: Any) -> Any:
        async def soon() -> Any:
            return await asyncio.wait_for(coroutine, 2 * WAIT_S)

        return asyncio.run(soon())

    def stream_error(
        self, number: int, prompt: Sequence[int], deltas: Sequence[GenerationDelta], first: int = 0
    ) -> float:
        """Of a greedy stream from model `number`, tokens from `first` on: see chosen_error."""
        tokens, values = tokens_of(deltas), log_probs_in(deltas)
        return chosen_error(self.models.reference(number), prompt, tokens, values, self.log_prob_kind, first)

    @offered(Capability.SERVER)
    def test_a_stream_gives_the_tokens_of_generate_and_ends_with_a_reason(self, rollout: RolloutServer) -> None:
        sampling = self.sampling(num_samples=3, max_new_tokens=40, temperature=0.0)
        if self.offers(Capability.ROW_SEEDS):
            sampling = attrs.evolve(sampling, temperature=1.0, seed=4)
        out = rollout.generate(prompts([5], [6], prompt_id=[30, 10]), sampling)
        one = attrs.evolve(sampling, num_samples=1)

        async def go() -> list[list[GenerationDelta]]:
            streams = [rollout.submit([6], one, request_id=f"r{j}", prompt_id=10, sample=j) for j in range(3)]
            return await asyncio.gather(*map(all_of, streams))

        reasons = objects(out.get("finish_reason"))[3:]
        for j, (deltas, want, reason) in enumerate(zip(self.run(go()), responses(out)[3:], reasons, strict=True)):
            assert tokens_of(deltas) == want
            assert len(log_probs_in(deltas)) == len(want)
            assert {delta.request_id for delta in deltas} == {f"r{j}"}
            assert {delta.weight_version for delta in deltas} == {0}
            assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [reason]
        assert objects(out.get("weight_versions")) == [[(0, len(row))] for row in responses(out)]

    @offered(Capability.SERVER)
    def test_each_request_has_log_probs_of_its_own_kind_whatever_runs_beside_it(self, rollout: RolloutServer) -> None:
        options: dict[str, Any] = {"temperature": 0.6, "max_new_tokens": 30, "ignore_eos": True}
        requests = [SamplingParams(top_k=5, log_probs=kind, **self.seed(3), **options) for kind in self.kinds()]

        async def go() -> list[list[GenerationDelta]]:
            return await asyncio.gather(*(all_of(rollout.submit([5, 6], each)) for each in requests))

        for sampling, deltas in zip(requests, self.run(go()), strict=True):
            want = log_probs_of(self.models.reference(1), [5, 6], tokens_of(deltas), sampling)
            assert (want - torch.tensor(log_probs_in(deltas))).abs().max() < self.bounds.sampled

    @offered(Capability.SERVER)
    @pytest.mark.parametrize("fault", ["samples", "empty", "long", "foreign", "stop"])
    def test_a_request_that_cannot_be_is_refused_at_once(self, rollout: RolloutServer, fault: str) -> None:
        prompt, sampling = [5], self.greedy(8)
        if fault == "samples":
            sampling = attrs.evolve(sampling, num_samples=2)
        elif fault == "stop":
            sampling = attrs.evolve(sampling, stop_token_ids=(64,))
        prompt = {"empty": [], "long": [5] * CONTEXT, "foreign": [64]}.get(fault, prompt)
        with pytest.raises(Refused):
            rollout.submit(prompt, sampling)

    @offered(Capability.SERVER)
    def test_an_aborted_request_keeps_what_it_has_and_the_others_go_on(self, rollout: RolloutServer) -> None:
        async def go() -> tuple[list[GenerationDelta], list[GenerationDelta]]:
            stream, other = rollout.submit([40, 41], self.endless, request_id="one"), rollout.submit([7], self.endless)
            deltas, others = await read_until(stream, 10), await read_until(other, 1)
            await rollout.abort(["one", "unknown"])
            return deltas + await all_of(stream), others + await all_of(other)

        deltas, others = self.run(go())
        assert deltas[-1].finish_reason == "abort"
        assert 10 <= len(tokens_of(deltas)) < LENGTH
        assert self.stream_error(1, [40, 41], deltas) < self.bounds.sampled
        assert (others[-1].finish_reason, len(tokens_of(others))) == ("length", LENGTH)

    @offered(Capability.SERVER)
    def test_an_abort_of_all_finds_a_request_that_has_only_just_begun(self, rollout: RolloutServer) -> None:
        async def go() -> list[GenerationDelta]:
            row = asyncio.ensure_future(all_of(rollout.submit([40, 41], self.endless)))
            await asyncio.sleep(0)
            await rollout.abort()
            return await row

        assert self.run(go())[-1].finish_reason == "abort"

    @offered(Capability.SERVER)
    def test_rows_of_generate_that_are_aborted_say_so(self, rollout: RolloutServer) -> None:
        for delay in (0.1, 0.2, 0.4, 0.8):  # an abort may come before the rows have begun, or after they have ended
            aborting = threading.Timer(delay, lambda: asyncio.run(rollout.abort()))
            aborting.start()
            out = rollout.generate(prompts([5, 6]), self.greedy(CONTEXT - 2, ignore_eos=True))
            aborting.join()
            [reason], [row] = objects(out.get("finish_reason")), responses(out)
            assert (reason == "length") == (len(row) == CONTEXT - 2)
            if reason != "length":
                break
        assert reason == "abort"

    @offered(Capability.SERVER)
    @pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
    def test_a_pause_keeps_awaits_or_aborts_what_runs_and_new_requests_wait(
        self, live: RolloutServer, mode: PauseMode
    ) -> None:
        async def go() -> tuple[list[GenerationDelta], list[GenerationDelta], bool]:
            stream = live.submit([9], self.endless)
            deltas = await read_until(stream, 5)
            await live.pause(mode)
            late = asyncio.ensure_future(all_of(live.submit([8], self.greedy(4, ignore_eos=True))))
            rest = asyncio.ensure_future(all_of(stream))
            # What has ended is told soon; what is held stays so however long one waits.
            await asyncio.wait([rest], timeout=0.5 if mode == "keep" else WAIT_S)
            has_ended = rest.done()
            assert not late.done()
            await live.resume_generation()
            return deltas + await rest, await late, has_ended

        deltas, late, has_ended = self.run(go())
        assert has_ended == (mode != "keep")
        assert deltas[-1].finish_reason == ("abort" if mode == "abort" else "length")
        assert (len(tokens_of(deltas)) == LENGTH) == (mode != "abort")
        assert self.stream_error(1, [9], deltas) < self.bounds.sampled
        assert (late[-1].finish_reason, len(tokens_of(late))) == ("length", 4)

    @offered(Capability.SERVER)
    def test_an_unknown_mode_of_pause_is_refused(self, rollout: RolloutServer) -> None:
        with pytest.raises(Refused, match="sleep"):
            self.run(rollout.pause("sleep"))  # type: ignore[arg-type]
        self.run(rollout.check_health())
        rollout.generate(prompts([5]), self.greedy(2))

    @offered(Capability.SERVER)
    def test_an_update_in_the_midst_of_a_request_says_which_weights_sampled_which_tokens(
        self, live: RolloutServer
    ) -> None:
        prompt = [1, 5, 6]

        async def go() -> list[GenerationDelta]:
            async with aclosing(live.submit(prompt, self.endless)) as stream:  # type: ignore[type-var]
                deltas = await read_until(stream, 20)
                await asyncio.to_thread(update, live, self.models.weights(2), 1)
                return deltas + await all_of(stream)

        deltas = self.run(go())
        assert (len(tokens_of(deltas)), deltas[-1].finish_reason) == (LENGTH, "length")
        versions = [delta.weight_version for delta in deltas for _ in delta.token_ids]
        num_old = versions.count(0)
        assert versions == [0] * num_old + [1] * (LENGTH - num_old)
        assert 20 <= num_old < LENGTH
        old = [delta for delta in deltas if delta.weight_version == 0]
        assert self.stream_error(1, prompt, old) < self.bounds.sampled
        assert self.stream_error(2, prompt, deltas, first=num_old) < self.bounds.sampled

    @offered(Capability.SERVER)
    def test_rows_that_an_update_comes_upon_have_their_oldest_version_and_its_spans(self, live: RolloutServer) -> None:
        for number, delay in enumerate((0.1, 0.2, 0.4, 0.8)):  # it may come before or after the rows
            updating = threading.Timer(delay, update, (live, self.models.weights(2 + number % 2), number + 1))
            updating.start()
            out = live.generate(prompts([5, 6], [7]), attrs.evolve(self.endless, num_samples=2))
            updating.join()
            spans = objects(out.get("weight_versions"))
            for row, tokens, oldest in zip(spans, responses(out), out["weight_version"].tolist(), strict=True):
                assert [version for version, _ in row] in ([number], [number + 1], [number, number + 1])
                assert sum(num for _, num in row) == len(tokens)
                assert oldest == row[0][0]
            if all(len(row) == 2 for row in spans):
                break
        assert [len(row) for row in spans] == [2] * 4

    @offered(Capability.SERVER)
    def test_without_whole_weights_requests_are_refused(self, live: RolloutServer) -> None:
        weights = self.models.weights(2)
        update(live, weights, 1)
        live.begin_weight_update(specs(weights), 2)
        live.load_bucket(next(buckets(weights)))
        live.abort_weight_update()
        for call in (lambda: live.submit([9], self.endless), lambda: self.run(live.resume_generation())):
            with pytest.raises(Refused):
                call()
