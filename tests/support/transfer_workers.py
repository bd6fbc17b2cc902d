"""Workers that fail in the midst of a transfer. A module of its own, so that Ray's processes can import it by name."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

from core.dispatch import Dispatch, register
from manymesh.workers import ActorRolloutRefWorker, RolloutWorker


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class MortalRollout(RolloutWorker):
    """Its process can be told to die, or to refuse, while it loads a bucket."""

    @register(Dispatch.ALL_TO_ALL)
    def end_at_bucket(self, number: int, rank: int, how: str) -> None:
        rollout: Any = self.rollout
        load, calls = rollout.load_bucket, []

        def limited(bucket: Any) -> None:
            calls.append(1)
            if self.rank == rank and len(calls) == number:
                rollout.load_bucket = load
                if how == "die":
                    _die()
                raise OSError("the link is down")
            load(bucket)

        rollout.load_bucket = limited


class MortalTrainer(ActorRolloutRefWorker):
    """Its rank 0 can be told to die while it exports."""

    @register()
    def die_at_tensor(self, number: int) -> None:
        engine: Any = self._actor().engine
        export = engine.export_weights

        def mortal(**options: Any) -> Iterator[Any]:
            for count, pair in enumerate(export(**options)):
                if count == number and self.rank == 0:
                    _die()
                yield pair

        engine.export_weights = mortal
