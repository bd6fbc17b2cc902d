"""What carries calls to workers, and what comes back: the driver's only way to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import attrs

from core._calls.call import Command, RankCall
from core._run.build import RayClassWithInitArgs
from core.errors import BadAnswer, Refused


@attrs.frozen
class Answered:
    value: Any  # encoded; None where no answer was to be sent


@attrs.frozen
class BadlyAnswered:
    """The method has run, and its answer cannot be sent."""

    error: BadAnswer


@attrs.frozen
class RefusedIt:
    error: Refused


@attrs.frozen
class Raised:
    """An exception in the worker. `at` is the clock's time, to find the first of several."""

    summary: str
    traceback: str
    at: float
    error: bytes | None = None  # pickled, since the driver may lack its class; None where it doesn't pickle
    collective: bool = False  # it, or what caused it, is a collective's error: the echo of another rank's end


@attrs.frozen
class Died:
    """The worker's process is gone."""

    exit: str


Outcome = Answered | BadlyAnswered | RefusedIt | Raised | Died


@attrs.frozen
class Identity:
    """Where a worker's process runs.

    Attributes:
        gpu_ids: of the accelerators that it was given, of whatever vendor, in the order of their numbers.
    """

    node_id: str
    node_address: str
    pid: int
    gpu_ids: tuple[str, ...] = ()
    log_files: tuple[str, ...] = ()


class Ticket(Protocol):
    """Calls under way on some ranks."""

    @property
    def ranks(self) -> frozenset[int]: ...
    def done(self) -> bool: ...
    def gather(self, timeout_s: float) -> dict[int, Outcome]:
        """Outcomes by rank: all of them, or what there is soon after the first that failed. Ranks that have not
        answered by the deadline are absent."""
        ...


class Transport(Protocol):
    """Carries calls to workers. The driver's only way to them.

    Attributes:
        store: kind of the store in which it can leave batches of answers; "" where it has none.
    """

    world_size: int
    identities: list[Identity]
    store: str

    def construct(self, build: RayClassWithInitArgs, observers: tuple[Any, ...]) -> Ticket: ...
    def route(self, mesh: str) -> Ticket: ...
    def run(self, command: Command, calls: Mapping[int, RankCall], answering: frozenset[int]) -> Ticket: ...
    def shutdown(self) -> Ticket: ...
    def end(self) -> None:
        """End all workers' processes now. Can be called twice."""
        ...

    def log_tail(self, rank: int) -> tuple[str, ...]:
        """Last lines that the rank's process wrote; empty where they can't be had."""
        ...
