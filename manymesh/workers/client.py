"""RolloutClient: the driver's side of rollouts that are servers: requests spread over replicas, streams, pauses."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Self

import attrs

from core.errors import DeadlineExceeded, ManymeshError, Refused, WorkerFailed
from core.group import WorkerGroup
from core.rollout import GenerationDelta, PauseMode, SamplingParams
from manymesh.workers.server import Request, RequestError

POLL_S = 0.05  # how long a replica holds a poll when there is nothing new; other calls to it wait so long


class RequestFailed(ManymeshError):
    """A request ended without a finish reason: its replica died, or gave up on it. The stream has what came before."""


@attrs.define(eq=False)
class Replica:
    """One rank of a group, and the requests that run there.

    Attributes:
        load: tokens that these may still have to prompt and sample.
    """

    group: Any
    rank: int
    running: dict[str, Stream] = attrs.field(factory=dict)
    load: int = 0
    failure: ManymeshError | None = None

    @property
    def name(self) -> str:
        return f"rank {self.rank} of group {self.group.name!r}"

    def add(self, stream: Stream) -> None:
        self.running[stream.request.id] = stream
        self.load += stream.left

    def remove(self, request_id: str) -> None:
        stream = self.running.pop(request_id, None)
        self.load -= 0 if stream is None else stream.left

    def deliver(self, delta: GenerationDelta) -> None:
        """Hand a delta to its stream; those of requests that were given up are dropped."""
        stream = self.running.get(delta.request_id)
        if stream is None:
            return
        stream.news.append(delta)
        stream.left -= len(delta.token_ids)
        self.load -= len(delta.token_ids)
        if delta.finish_reason is not None:
            self.remove(delta.request_id)

    def fail(self, request_id: str, error: RequestFailed) -> None:
        if (stream := self.running.get(request_id)) is not None:
            stream.news.append(error)
            self.remove(request_id)


class Stream(Iterator[GenerationDelta]):
    """One request's deltas, as they come.

    Attributes:
        request: what was asked.
        replica: who answers.
        token_ids, log_probs: all that have been iterated over.
        weight_versions: of these, [(version, number of tokens), ...] in order.
        finish_reason: "stop", "length" or "abort"; None before the last delta.
        news: what has come and was not iterated over.
        left: tokens of prompt and response, less those that have come.
    """

    def __init__(self, client: RolloutClient, replica: Replica, request: Request) -> None:
        self.request, self.replica = request, replica
        self.token_ids: list[int] = []
        self.log_probs: list[float] = []
        self.weight_versions: list[tuple[int, int]] = []
        self.finish_reason: str | None = None
        self._client = client
        self.news: deque[GenerationDelta | RequestFailed] = deque()
        self.left = len(request.prompt_ids) + request.sampling.max_new_tokens

    def __next__(self) -> GenerationDelta:
        """Wait for the next delta.

        Raises:
            RequestFailed: the request has failed.
            DeadlineExceeded: nothing came in the client's time.
        """
        if self.finish_reason is not None:
            raise StopIteration
        self._client._wait_for(self.replica, self)
        if isinstance(self.news[0], RequestFailed):
            raise self.news[0]  # stays, for who asks again
        delta = self.news.popleft()
        assert isinstance(delta, GenerationDelta)
        self.token_ids += delta.token_ids
        self.log_probs += delta.log_probs
        self.finish_reason = delta.finish_reason
        if delta.token_ids:
            version, number = delta.weight_version, len(delta.token_ids)
            if self.weight_versions and self.weight_versions[-1][0] == version:
                number += self.weight_versions.pop()[1]
            self.weight_versions.append((version, number))
        return delta

    def result(self) -> Self:
        """This stream, at its end. Raises as iterating does."""
        for _ in self:
            pass
        return self

    def abort(self) -> None:
        """End the request; what was sampled still comes."""
        self._client.abort([self.request.id])


class RolloutClient:
    """Requests to replicas, each of which is a rank of a RolloutServerWorker's group.

    Each request goes to the replica with the fewest tokens still to prompt and sample. When a worker dies its group is
    ended: give each replica a group of its own, where others shall go on. The requests of those that died end with
    RequestFailed.

    Calls may come from several threads, but not while another calls the groups themselves (as WeightSync.sync does).
    A sync while requests run pauses and resumes them itself.

    Args:
        groups: with init_model done.
        timeout_s: deadline of a wait for the next delta of a request.

    Example:
        client = RolloutClient([group_a, group_b])
        for delta in client.submit(prompt, sampling):
            ...
        rows = [stream.result() for stream in client.submit_all(prompts, sampling)]
    """

    def __init__(self, groups: Sequence[WorkerGroup], *, timeout_s: float = 600.0) -> None:
        self._replicas = [Replica(group, rank) for group in groups for rank in range(group.world_size)]
        self._timeout_s = timeout_s
        self._lock = threading.RLock()
        self._name, self._ids = secrets.token_hex(8), itertools.count()

    @property
    def alive(self) -> list[WorkerGroup]:
        """The groups that have not failed."""
        return list(dict.fromkeys(each.group for each in self._replicas if each.failure is None))

    @property
    def loads(self) -> dict[str, int]:
        """Tokens still to prompt and sample, by live replica."""
        return {each.name: each.load for each in self._replicas if each.failure is None}

    def submit(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, *, prompt_id: int = 0, sample: int = 0
    ) -> Stream:
        """Begin one request. With row seeds it draws from (sampling.seed, prompt_id, sample).

        Raises:
            Refused: the rollout cannot do what is asked.
            RequestFailed: no replica lives.
        """
        [stream] = self._begin([Request(self._new_id(), tuple(prompt_ids), sampling, prompt_id, sample)])
        return stream

    def submit_all(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Stream]:
        """sampling.num_samples requests of each prompt, prompt-major, spread over all replicas. prompt_id is the
        prompt's number. Raises as submit; requests that have begun on other replicas are aborted then."""
        one = attrs.evolve(sampling, num_samples=1)
        return self._begin(
            [
                Request(self._new_id(), tuple(prompt), one, number, sample)
                for number, prompt in enumerate(prompts)
                for sample in range(sampling.num_samples)
            ]
        )

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End these requests, or all. Requests that have ended are ignored. What was sampled still comes."""
        with self._lock:
            for replica in self._live():
                ids = [each for each in replica.running if request_ids is None or each in request_ids]
                if ids:
                    self._call(replica, "abort_requests", replica.rank, ids)

    def pause(self, mode: PauseMode = "keep") -> None:
        """Return when nothing runs on any replica: requests are kept for later, awaited or aborted. New ones wait."""
        self._each_group("pause_generation", mode)

    def resume_generation(self) -> None:
        """Let requests go on."""
        self._each_group("resume_generation")

    def check_health(self) -> list[str]:
        """Ask all replicas; the names of those that have failed, now or before."""
        self._each_group("check_health")
        return [each.name for each in self._replicas if each.failure is not None]

    # -------------------------------------------------------------------------------------------- inside

    def _new_id(self) -> str:
        return f"{self._name}-{next(self._ids)}"

    def _live(self) -> list[Replica]:
        return [each for each in self._replicas if each.failure is None]

    def _begin(self, requests: Sequence[Request]) -> list[Stream]:
        streams: dict[str, Stream] = {}
        shares_begun: list[tuple[Replica, list[Request]]] = []
        with self._lock:
            rest = list(requests)
            while rest:
                shares: dict[Replica, list[Request]] = {}
                for request in rest:
                    replica = self._least_loaded()
                    streams[request.id] = Stream(self, replica, request)
                    replica.add(streams[request.id])
                    shares.setdefault(replica, []).append(request)
                rest = []
                for replica, share in shares.items():
                    try:
                        if self._call(replica, "submit_requests", replica.rank, self._name, share):
                            shares_begun.append((replica, share))
                        else:
                            rest += share  # it has died with none of them begun
                    except Refused:
                        for stream in streams.values():
                            stream.replica.remove(stream.request.id)
                        for other, share_begun in shares_begun:
                            self._call(other, "abort_requests", other.rank, [each.id for each in share_begun])
                        raise
        return [streams[request.id] for request in requests]

    def _least_loaded(self) -> Replica:
        live = self._live()
        if not live:
            cause = self._replicas[0].failure if self._replicas else None
            raise RequestFailed(
                "no replica lives", have=f"{len(self._replicas)} dead", mend="build new groups"
            ) from cause
        return min(live, key=lambda each: (each.load, len(each.running)))

    def _wait_for(self, replica: Replica, stream: Stream) -> None:
        """Poll the stream's replica until there is something for it."""
        deadline = time.monotonic() + self._timeout_s
        while not stream.news:
            with self._lock:
                if not stream.news:
                    self._poll(replica)
            if not stream.news and time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"nothing came of request {stream.request.id!r} within {self._timeout_s:g} s",
                    where=replica.name,
                    mend="see whether generation is paused; give the client a longer timeout_s",
                )

    def _poll(self, replica: Replica) -> None:
        answer = self._call(replica, "poll_requests", replica.rank, self._name, POLL_S)
        for each in answer[0] if answer else ():
            if isinstance(each, RequestError):
                message = f"request {each.request_id!r} failed: {each.error}"
                replica.fail(each.request_id, RequestFailed(message, where=replica.name))
            else:
                replica.deliver(each)

    def _each_group(self, method: str, *args: Any) -> None:
        with self._lock:
            for group in self.alive:
                self._call(next(each for each in self._live() if each.group is group), method, *args)

    def _call(self, replica: Replica, method: str, *args: Any) -> list[Any]:
        """[answer], or nothing where the replica's group has failed: then its requests have ended."""
        if replica.failure is None:
            try:
                return [getattr(replica.group, method)(*args)]
            except Refused:
                raise
            except (WorkerFailed, DeadlineExceeded) as error:
                for each in self._replicas:
                    if each.group is replica.group:
                        self._mark_failed(each, error)
        return []

    def _mark_failed(self, replica: Replica, error: ManymeshError) -> None:
        replica.failure = error
        for request_id in list(replica.running):
            failure = RequestFailed(
                f"request {request_id!r} ended with its replica: {error.message}",
                where=replica.name,
                mend="submit it again: it goes to a replica that lives",
            )
            failure.__cause__ = error
            replica.fail(request_id, failure)
