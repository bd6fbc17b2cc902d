"""A group within the driver's own process: for debuggers, and for tests of what needs no second process.

Ranks run one after the other, so that a breakpoint in a worker stops the driver right there. A world of one can use
torch.distributed; ranks of a larger one cannot meet in a collective.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from core._calls.calls import Order, RankCall
from core._rows.wire import encode
from core._run.host import WorkerHost
from core._run.transport import Answered, Identity, Outcome, Raised
from core.errors import Refused
from core.group import RayClassWithInitArgs, WorkerGroup
from core.worker import WorkerContext


@attrs.frozen
class _Ended:
    """Outcomes that are already there."""

    outcomes: dict[int, Outcome]

    @property
    def ranks(self) -> frozenset[int]:
        return frozenset(self.outcomes)

    def done(self) -> bool:
        return True

    def gather(self, timeout_s: float) -> dict[int, Outcome]:
        return self.outcomes


class LocalTransport:
    """Workers in this process, one after the other. After a rank that fails the others are not called."""

    keeps = ""  # batches are in the driver's process anyway

    def __init__(self, world_size: int, group: str) -> None:
        self.world_size = world_size
        self.identities = [Identity("local", "127.0.0.1", os.getpid()) for _ in range(world_size)]
        self._group = group
        self._hosts = [WorkerHost() for _ in range(world_size)]

    def construct(self, cls_with_args: RayClassWithInitArgs, observers: tuple[object, ...]) -> _Ended:
        made = cls_with_args
        args, kwargs = encode(made.args), encode(dict(made.kwargs))
        contexts = [
            WorkerContext(self._group, rank, self.world_size, rank, self.world_size) for rank in range(self.world_size)
        ]
        return self._each(
            range(self.world_size),
            lambda rank: self._hosts[rank].construct(
                made.cls, _private(args), _private(kwargs), contexts[rank], observers, set_env=False
            ),
        )

    def route(self, mesh: str) -> _Ended:
        return self._each(range(self.world_size), lambda rank: self._hosts[rank].route(mesh))

    def run(self, order: Order, calls: Mapping[int, RankCall], answering: frozenset[int]) -> _Ended:
        def go(rank: int) -> Outcome:
            call = calls[rank]
            args, kwargs = _private(encode(call.args)), _private(encode(dict(call.kwargs)))
            outcome = self._hosts[rank].run(order, RankCall(args, kwargs, call.shard), rank in answering)
            return Answered(_private(outcome.value)) if isinstance(outcome, Answered) else outcome

        return self._each(calls, go)

    def shutdown(self) -> _Ended:
        return self._each(range(self.world_size), lambda rank: self._hosts[rank].shutdown())

    def end(self) -> None:
        self._hosts = []

    def log_tail(self, rank: int) -> tuple[str, ...]:
        return ()

    def _each(self, ranks: Any, action: Callable[[int], Outcome]) -> _Ended:
        outcomes: dict[int, Outcome] = {}
        for rank in ranks:
            outcomes[rank] = action(rank)
            if isinstance(outcomes[rank], Raised):
                break
        return _Ended(outcomes)


def _private(encoded: Any) -> Any:
    """What Ray's pickling does between processes: nothing mutable is shared."""
    return copy.deepcopy(encoded)


class LocalWorkerGroup(WorkerGroup):
    """A WorkerGroup in this process.

    Args:
        cls_with_args: what to construct on each rank.
        world_size: number of ranks, run in turn.

    Raises:
        Refused: world_size is below 1.
    """

    def __init__(
        self,
        cls_with_args: RayClassWithInitArgs,
        world_size: int = 1,
        *,
        name: str | None = None,
        timeout_s: float = 7200.0,
        observers: Sequence[object] = (),
    ) -> None:
        if world_size < 1:
            raise Refused("a group has at least one rank", have=world_size)
        transport = LocalTransport(world_size, name or cls_with_args.cls.__name__)
        super().__init__(transport, cls_with_args, name=name, timeout_s=timeout_s, observers=observers)
