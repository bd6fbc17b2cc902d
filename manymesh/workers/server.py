"""RolloutServerWorker: a rollout that serves, alone on its ranks. See manymesh.workers.client for the driver's side.

An actor of a group runs one method at a time, and no method of a worker is a coroutine. So requests run on an event
loop in a thread of the worker's, which collects what they give; the driver asks for it by `poll_requests`. It needs no
second actor and works on every transport, and what was sampled before a pause is there once the pause has returned.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

import attrs

from core.dispatch import Call, Dispatch, DispatchMode, RankCall, register
from core.errors import Refused
from core.manifest import Capability
from core.registry import EngineRegistry
from core.rollout import GenerationDelta, PauseMode, RolloutServer, SamplingParams
from manymesh.parts.event_loop import LoopThread
from manymesh.workers.rollout import RolloutWorker

T = TypeVar("T")


@attrs.frozen
class Request:
    """One response that is asked for; see RolloutServer.submit."""

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    prompt_id: int = 0
    sample: int = 0


@attrs.frozen
class RequestError:
    """A request ended with an exception in its replica."""

    request_id: str
    error: str


def _to_replica(call: Call) -> Sequence[RankCall | None]:
    rank = call.arguments.arguments["rank"]
    if not isinstance(rank, int) or not 0 <= rank < call.world_size:
        raise Refused("there is no such replica", have=rank, want=f"0..{call.world_size - 1}", where=call.where)
    [same, *_] = Dispatch.ONE_TO_ALL.dispatch(call)
    return [same if each == rank else None for each in range(call.world_size)]


TO_REPLICA = DispatchMode("TO_REPLICA", _to_replica, lambda call, answers: next(iter(answers.values())))
"""To the rank that the argument `rank` names; its value."""


class RolloutServerWorker(RolloutWorker):
    """A rollout that serves requests (Capability.SERVER), one replica a rank."""

    _loop: LoopThread | None = None

    def init_model(self) -> None:
        """Build the rollout, with the weights of its model directory as version 0.

        Raises:
            Refused: the backend doesn't serve.
        """
        capabilities = EngineRegistry.get(self.config.backend, kind="rollout").manifest.capabilities
        if Capability.SERVER not in capabilities:
            raise Refused(
                f"the rollout {self.config.backend!r} doesn't serve requests",
                have=sorted(capabilities),
                want=Capability.SERVER,
                mend="choose another backend, or RolloutWorker",
            )
        super().init_model()
        self._news: dict[str, list[GenerationDelta | RequestError]] = {}  # by client
        self._has_news = threading.Condition()
        self._loop = LoopThread("requests")

    @property
    def server(self) -> RolloutServer:
        return self.need_rollout()  # type: ignore[return-value]

    @register(TO_REPLICA)
    def submit_requests(self, rank: int, client: str, requests: Sequence[Request]) -> None:
        """Begin requests on the replica. Raises Refused where one of them cannot be; then none is begun.

        Args:
            client: who will poll for what they give.
        """
        streams = [
            self.server.submit(
                each.prompt_ids, each.sampling, request_id=each.id, prompt_id=each.prompt_id, sample=each.sample
            )
            for each in requests
        ]
        for each, stream in zip(requests, streams, strict=True):
            self._requests_loop().start(self._collect(client, each.id, stream))

    @register(TO_REPLICA)
    def poll_requests(self, rank: int, client: str, wait_s: float = 0.0) -> Sequence[GenerationDelta | RequestError]:
        """What the client's requests have given since its last poll; waits so long where that is nothing."""
        with self._has_news:
            self._has_news.wait_for(lambda: client in self._news, wait_s)
            return self._news.pop(client, [])

    @register(TO_REPLICA)
    def abort_requests(self, rank: int, request_ids: Sequence[str] | None = None) -> None:
        """End these requests of the replica, or all. What was sampled is kept."""
        self._call(self.server.abort(request_ids))

    @register()
    def pause_generation(self, mode: PauseMode = "keep") -> None:
        """Return when nothing runs; see core.rollout.RolloutServer.pause. New requests wait."""
        self._call(self.server.pause(mode))

    @register()
    def resume_generation(self) -> None:
        """Let requests go on."""
        self._call(self.server.resume_generation())

    @register()
    def check_health(self) -> None:
        """Raises ManymeshError where the replica will never answer again."""
        self._call(self.server.check_health())

    async def _collect(self, client: str, request_id: str, stream: AsyncIterator[GenerationDelta]) -> None:
        try:
            async for delta in stream:
                self._tell(client, delta)
        except Exception as error:
            self._tell(client, RequestError(request_id, f"{type(error).__name__}: {error}"))

    def _tell(self, client: str, news: GenerationDelta | RequestError) -> None:
        with self._has_news:
            self._news.setdefault(client, []).append(news)
            self._has_news.notify_all()

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._requests_loop().call(coroutine)

    def _requests_loop(self) -> LoopThread:
        if self._loop is None:
            raise Refused("the worker has no rollout yet", mend="call init_model first")
        return self._loop

    def shutdown(self) -> None:
        """End all requests, then the replica."""
        if self._loop is not None:
            self._loop.end()
            self._loop = None
        super().shutdown()
