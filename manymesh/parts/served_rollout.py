"""What rollouts that serve have in common: versions, pauses, and weight updates in the midst of requests.

A backend's rollout subclasses ServedRollout, and gives it its engine as a ServedEngine.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import torch
from tensordict import TensorDict

from core.engine import WeightSpec
from core.errors import Refused
from core.mesh import RankMesh
from core.rollout import GenerationDelta, MemoryTag, PauseMode, SamplingParams
from manymesh.parts.rollout_checks import check_tags, no_update, not_initialized, valid_version
from manymesh.parts.rollout_rows import Prompts
from manymesh.parts.served_rows import one_prompt, served_batch
from manymesh.parts.weights import Announced, check_specs

T = TypeVar("T")
Bucket = Sequence[tuple[str, torch.Tensor]]


class ServedEngine(Protocol):
    """An engine in a process of its own, and the event loop that talks to it. Coroutines run on that loop.

    Requests are whatever the backend's rollout makes of them.
    """

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it there and wait for it, from any other thread."""
        ...

    async def there(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it there and await it, on any loop."""
        ...

    def stream(self, request: Any, version: int) -> AsyncIterator[GenerationDelta]:
        """A request's deltas, each of one weight version, on any loop. Closing it aborts the request.

        Args:
            version: for a last delta without tokens.
        """
        ...

    async def answers(self, requests: Sequence[Any], version: int) -> list[list[GenerationDelta]]:
        """All deltas by request. When one fails the others are aborted."""
        ...

    async def abort(self, request_ids: Sequence[str] | None) -> None: ...
    async def pause(self, mode: PauseMode) -> None: ...
    async def resume(self) -> None: ...
    async def check_health(self) -> None: ...

    async def begin_load(self, specs: Sequence[WeightSpec], version: int) -> None:
        """The first bucket is about to come. Nothing runs."""
        ...

    async def load(self, bucket: Bucket) -> None: ...
    async def end_load(self, version: int) -> None:
        """All have come: put them to use. No KV cache of other weights is left."""
        ...

    async def abort_load(self) -> bool:
        """Forget what has come; whether the weights before it are still whole."""
        ...

    async def release(self, tags: Sequence[str]) -> None: ...
    async def resume_memory(self, tags: Sequence[str]) -> None: ...
    def shutdown(self) -> None: ...


class ServedRollout:
    """`core.rollout.RolloutServer` over a ServedEngine.

    Versions: 0 after `initialize()`, the update's version after `finish_weight_update()`, None in between, after a
    failed update and after `release(["weights"])`, until a whole update was loaded.

    A weight update pauses what runs, in whatever thread it is called, and lets it go on with the new weights. Methods
    may be called from several threads, those of an update from one.
    """

    def __init__(self, mesh: RankMesh) -> None:
        self._mesh = mesh
        self._engine: ServedEngine | None = None
        self._expected: dict[str, torch.Tensor] = {}
        self._asleep: frozenset[str] = frozenset()
        self._version: int | None = None
        self._update: _Update | None = None
        self._paused = self._asked_to_pause = False

    # ------------------------------------------------------------------------------------- what a backend does

    def _start(self) -> tuple[ServedEngine, dict[str, torch.Tensor]]:
        """The engine with the directory's weights, and what save_pretrained would write of them."""
        raise NotImplementedError

    def _requests(
        self, table: Prompts, sampling: SamplingParams, sample: torch.Tensor, request_ids: Sequence[str]
    ) -> list[Any]:
        """By row, for the engine. Raises Refused for what cannot be sampled."""
        raise NotImplementedError

    def _check_can_release(self) -> None:
        """Raises Refused where release would free nothing."""
        raise NotImplementedError

    # ---------------------------------------------------------------------------------------------- requests

    @property
    def mesh(self) -> RankMesh:
        return self._mesh

    @property
    def weight_version(self) -> int | None:
        return self._version

    def initialize(self) -> None:
        """Start the engine's process with the directory's weights, which are version 0.

        Raises:
            Refused: no checkpoint is there, or the engine doesn't take it.
        """
        self._engine, self._expected = self._start()
        self._update, self._version, self._asleep = None, 0, frozenset()
        self._paused = self._asked_to_pause = False

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        prompt_id: int = 0,
        sample: int = 0,
    ) -> AsyncIterator[GenerationDelta]:
        """See `core.rollout.RolloutServer`. May be awaited on any event loop; closing it aborts the request.

        Raises:
            Refused: as generate, or num_samples is not 1.
        """
        version = self._may_sample(None)
        table = one_prompt(prompt_ids, sampling, prompt_id)
        [request] = self._requests(table, sampling, torch.tensor([sample]), [request_id or secrets.token_hex(8)])
        return self._running().stream(request, version)

    def generate(self, prompts: TensorDict, sampling: SamplingParams, *, min_version: int | None = None) -> TensorDict:
        """See `core.rollout.Rollout.generate`. Rows are in order, whichever ends first.

        Adds the column weight_versions, see `core.rollout.RolloutServer`. Rows that are aborted meanwhile come back
        as far as they were sampled.

        Raises:
            Refused: no valid weights, or older than min_version, or the KV cache is released; generation is paused;
                what cannot be sampled.
            ManymeshError: the engine died, or the model gave logits that are not finite.
        """
        version = self._may_sample(min_version)
        if self._asked_to_pause:
            raise Refused("generation is paused, so that generate would wait for ever", mend="resume_generation()")
        engine = self._running()
        table = Prompts.read(prompts)
        sample = torch.arange(sampling.num_samples).repeat(len(table))
        table = table.repeat(sampling.num_samples)
        requests = self._requests(table, sampling, sample, [secrets.token_hex(8) for _ in range(len(table))])
        answers = engine.call(engine.answers(requests, version)) if requests else []
        return served_batch(table, answers, sampling, version)

    def _may_sample(self, min_version: int | None) -> int:
        version = valid_version(self._version, min_version, self._state())
        if self._asleep:
            raise Refused("the KV cache is released", mend="resume(['kv_cache']) before generating")
        return version

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """See `core.rollout.RolloutServer`."""
        engine = self._running()
        await engine.there(engine.abort(request_ids))

    async def pause(self, mode: PauseMode) -> None:
        """See `core.rollout.RolloutServer`. Raises Refused for an unknown mode."""
        if mode not in ("keep", "wait", "abort"):
            raise Refused("unknown mode of pause", have=mode, want="keep, wait or abort")
        engine = self._running()
        self._asked_to_pause = self._paused = True
        await engine.there(engine.pause(mode))

    async def resume_generation(self) -> None:
        """Let requests go on. Raises Refused while there are no valid weights: a weight update resumes by itself."""
        valid_version(self._version, None, self._state())
        engine = self._running()
        await engine.there(engine.resume())
        self._asked_to_pause = self._paused = False

    async def check_health(self) -> None:
        """Raises ManymeshError where the engine will never answer again."""
        engine = self._running()
        await engine.there(engine.check_health())

    def _running(self) -> ServedEngine:
        if self._engine is None:
            raise not_initialized()
        return self._engine

    def _state(self) -> str:
        if self._engine is None:
            return "not initialized"
        if "weights" in self._asleep:
            return "weights released"
        return "a weight update under way" if self._update else "weights released or an update not finished"

    # ------------------------------------------------------------------------------------------------ memory

    def release(self, tags: Sequence[MemoryTag]) -> None:
        """Free memory, on CUDA; what runs is aborted.

        Raises:
            Refused: the engine frees nothing on this device.
        """
        engine = self._running()
        check_tags(tags)
        self._check_can_release()
        if "weights" in tags:
            self.abort_weight_update()
            self._version = None
        if wanted := sorted(set(tags) - self._asleep):
            engine.call(engine.abort(None))
            engine.call(engine.release(wanted))
            self._asleep |= set(wanted)

    def resume(self, tags: Sequence[MemoryTag]) -> None:
        """Take memory again; what is not released stays as it is. Weights hold garbage then, until a whole update."""
        engine = self._running()
        check_tags(tags)
        if waking := sorted(self._asleep & set(tags), reverse=True):
            engine.call(engine.resume_memory(waking))
            self._asleep -= set(waking)

    # ----------------------------------------------------------------------------------------------- weights

    def begin_weight_update(self, specs: Sequence[WeightSpec], version: int) -> None:
        """See `core.rollout.Rollout`. Requests that run are kept, and wait. An update that was begun before and not
        finished is forgotten.

        Raises:
            Refused: names, shapes or kinds of dtype differ from the model's (dtypes of one kind are cast), or the
                weights are released. Nothing has changed then.
        """
        engine = self._running()
        if "weights" in self._asleep:
            raise Refused(
                "the rollout's weights are released, so there is nothing to load into",
                mend="resume(['weights']) before the update",
            )
        check_specs(specs, self._expected)
        self.abort_weight_update()
        self._update = _Update(Announced(specs, self._expected), tuple(specs), version, self._version)
        self._version = None
        if not self._paused:
            engine.call(engine.pause("keep"))
            self._paused = True

    def load_bucket(self, bucket: Bucket) -> None:
        """Send full tensors to the engine's process; they may be reused after return.

        Raises:
            Refused: no update was begun; a tensor was not announced, came before or has another shape. Nothing of the
                bucket is loaded then.
            ManymeshError: the engine did not take them.
        """
        engine, update = self._running(), self._under_way()
        update.announced.check(bucket)
        if not bucket:
            return
        if update.before_loading:
            update.before_loading = False
            engine.call(engine.begin_load(update.specs, update.version))
        engine.call(engine.load(bucket))
        update.announced.came(bucket)

    def finish_weight_update(self) -> None:
        """Requests go on with the new weights, unless they were paused before.

        Raises:
            Refused: weights have not come, named; weight_version stays None then.
        """
        engine, update = self._running(), self._under_way()
        update.announced.check_complete()
        engine.call(engine.end_load(update.version))
        self._update, self._version = None, update.version
        self._go_on()

    def abort_weight_update(self) -> None:
        """Forget the update.

        Where nothing was loaded yet, the weights are whole, and requests go on with them. Else weight_version stays
        None, what runs is aborted, and what was sampled of it is kept.
        """
        update, self._update = self._update, None
        if update is None:
            return
        engine = self._running()
        if update.before_loading or engine.call(engine.abort_load()):
            self._version = update.version_before
            if self._version is not None:
                self._go_on()
            return
        engine.call(engine.abort(None))

    def _go_on(self) -> None:
        if self._paused and not self._asked_to_pause:
            engine = self._running()
            engine.call(engine.resume())
            self._paused = False

    def _under_way(self) -> _Update:
        if self._update is None:
            raise no_update()
        return self._update

    def shutdown(self) -> None:
        """End the engine's process. `initialize()` may start another."""
        engine, self._engine = self._engine, None
        self._update = self._version = None
        self._asleep = frozenset()
        if engine is not None:
            engine.shutdown()


class _Update:
    """A weight update under way.

    Attributes:
        version_before: of the weights that are still whole while before_loading.
    """

    def __init__(
        self, announced: Announced, specs: tuple[WeightSpec, ...], version: int, version_before: int | None
    ) -> None:
        self.announced, self.specs, self.version = announced, specs, version
        self.version_before, self.before_loading = version_before, True
