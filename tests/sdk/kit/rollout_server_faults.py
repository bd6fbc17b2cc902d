"""Faults of a rollout that serves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import attrs
from tensordict import TensorDict

from core.batch import objects
from core.errors import Refused
from core.manifest import Capability
from core.registry import Backend
from core.rollout import GenerationDelta, LogProbKind, PauseMode, SamplingParams
from tests.sdk.kit.fake_server import FakeServerRollout
from tests.sdk.kit.faults import Mutant, capabilities, caught_by, with_manifest
from tests.sdk.kit.rollout_faults import RolloutFault

Deltas = AsyncIterator[GenerationDelta]


def that_serves(entry: Backend) -> Backend:
    return with_manifest(entry, capabilities=capabilities(entry) | {Capability.SERVER})


SOUND = Mutant("serves, without a fault", (), put_into=f"{__name__}:FakeServerRollout", entry=that_serves)


class ServerFault(RolloutFault):
    """A fault of a server that is made of the rollout."""

    @classmethod
    def put_into(cls, rollout: Any) -> Any:
        return super().put_into(FakeServerRollout(rollout))

    @staticmethod
    def entry(entry: Backend) -> Backend:
        return that_serves(entry)

    def submit(self, prompt_ids: Sequence[int], sampling: SamplingParams, **options: Any) -> Deltas:
        return self.change_answer(super().submit(prompt_ids, self.change_request(sampling), **options))  # type: ignore[misc]

    def change_request(self, sampling: SamplingParams) -> SamplingParams:
        return sampling

    def change_answer(self, stream: Deltas) -> Deltas:
        return stream


@caught_by("test_an_aborted_request_keeps_what_it_has_and_the_others_go_on")
class WithholdsTokens(ServerFault):
    """gives a request's tokens when it has ended"""

    async def change_answer(self, stream: Deltas) -> Deltas:
        for delta in [delta async for delta in stream]:
            yield delta


@caught_by("test_an_aborted_request_keeps_what_it_has_and_the_others_go_on")
class HidesAborts(ServerFault):
    """says of aborted requests that they stopped"""

    async def change_answer(self, stream: Deltas) -> Deltas:
        async with aclosing(stream):  # type: ignore[type-var]
            async for delta in stream:
                yield attrs.evolve(delta, finish_reason="stop") if delta.finish_reason == "abort" else delta


@caught_by("test_an_aborted_request_keeps_what_it_has_and_the_others_go_on")
class AbortsAll(ServerFault):
    """aborts all requests where some are named"""

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        await super().abort(None)  # type: ignore[misc]


@caught_by(
    "test_an_abort_of_all_finds_a_request_that_has_only_just_begun", "test_rows_of_generate_that_are_aborted_say_so"
)
class AbortsNamed(ServerFault):
    """aborts only what is named"""

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        await super().abort(request_ids or [])  # type: ignore[misc]


@caught_by("test_a_pause_keeps_awaits_or_aborts_what_runs_and_new_requests_wait")
class NeverPauses(ServerFault):
    """goes on in a pause"""

    async def pause(self, mode: PauseMode) -> None:
        return


@caught_by("test_a_pause_keeps_awaits_or_aborts_what_runs_and_new_requests_wait[keep]")
class AbortsInPause(ServerFault):
    """aborts in a pause what it is to keep"""

    async def pause(self, mode: PauseMode) -> None:
        await super().pause("abort" if mode == "keep" else mode)  # type: ignore[misc]


@caught_by("test_an_unknown_mode_of_pause_is_refused")
class PausesAnyhow(ServerFault):
    """takes an unknown mode of pause for keep"""

    async def pause(self, mode: PauseMode) -> None:
        await super().pause(mode if mode in ("wait", "abort") else "keep")  # type: ignore[misc]


@caught_by("test_an_update_in_the_midst_of_a_request_says_which_weights_sampled_which_tokens")
class SaysFirstVersion(ServerFault):
    """says of all of a request's tokens that the weights sampled them with which it began"""

    async def change_answer(self, stream: Deltas) -> Deltas:
        first = None
        async with aclosing(stream):  # type: ignore[type-var]
            async for delta in stream:
                first = delta.weight_version if first is None else first
                yield attrs.evolve(delta, weight_version=first)


@caught_by("test_rows_that_an_update_comes_upon_have_their_oldest_version_and_its_spans")
class SaysNewest(ServerFault):
    """says of rows that the newest weights sampled them"""

    def generate(self, batch: TensorDict, sampling: SamplingParams, *, min_version: int | None = None) -> TensorDict:
        out: TensorDict = super().generate(batch, sampling, min_version=min_version)  # type: ignore[misc]
        for row, spans in enumerate(objects(out.get("weight_versions"))):
            out["weight_version"][row] = spans[-1][0]
        return out


@caught_by("test_a_request_that_cannot_be_is_refused_at_once[samples]")
class TakesSamples(ServerFault):
    """gives one response where several are asked for"""

    def change_request(self, sampling: SamplingParams) -> SamplingParams:
        return attrs.evolve(sampling, num_samples=1)


@caught_by("test_a_request_that_cannot_be_is_refused_at_once")
class RefusesLate(ServerFault):
    """refuses a request when its first token is asked for"""

    async def submit(self, prompt_ids: Sequence[int], sampling: SamplingParams, **options: Any) -> Deltas:
        async with aclosing(super().submit(prompt_ids, sampling, **options)) as stream:  # type: ignore[type-var]
            async for delta in stream:
                yield delta


@caught_by("test_a_stream_gives_the_tokens_of_generate_and_ends_with_a_reason")
class DrawsAlike(ServerFault):
    """draws all samples of a prompt from one stream"""

    def submit(self, prompt_ids: Sequence[int], sampling: SamplingParams, **options: Any) -> Deltas:
        return super().submit(prompt_ids, sampling, **options | {"sample": 0})


@caught_by("test_each_request_has_log_probs_of_its_own_kind_whatever_runs_beside_it")
class OneKind(ServerFault):
    """gives requests log-probs of one kind"""

    def change_request(self, sampling: SamplingParams) -> SamplingParams:
        return attrs.evolve(sampling, log_probs=LogProbKind.RAW)


@caught_by("test_without_whole_weights_requests_are_refused")
class ServesAnyway(ServerFault):
    """takes requests without whole weights"""

    def submit(self, prompt_ids: Sequence[int], sampling: SamplingParams, **options: Any) -> Deltas:
        try:
            return super().submit(prompt_ids, sampling, **options)
        except Refused:
            if self.weight_version is not None:
                raise
            return self.later(lambda: super(ServesAnyway, self).submit(prompt_ids, sampling, **options))

    async def later(self, submit: Callable[[], Deltas]) -> Deltas:
        async for delta in submit():
            yield delta
