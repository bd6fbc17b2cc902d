"""What the suite of transfers runs on: the peers of a transfer as threads of this process, and rounds of the kit's own,
made from the protocol alone."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist

from core.errors import DeadlineExceeded, ManymeshError
from core.manifest import Kind
from core.transfer import WeightTransfer
from sdk.conformance.base import Conformance

T = TypeVar("T")
Pieces = Sequence[torch.Tensor]
DEPTH = 2  # buckets that are sent and not freed
SLACK_S = 4.0  # of a busy machine, for what should be immediate


class RoundStopped(ManymeshError):
    """Another end has stopped the round."""


class Meeting:
    """What the peers of one round share."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.values: dict[str, bytes] = {}
        self.counts: Counter[str] = Counter()
        self.store = dist.HashStore()
        self.lock = threading.Lock()
        self.reason = ""

    def round(self) -> MeetingRound:
        """One end's view."""
        return MeetingRound(self)

    def stop(self, reason: str) -> None:
        self.reason = reason


class MeetingRound:
    """A core.transfer.TransferRound, and nothing beside it."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting

    @property
    def timeout_s(self) -> float:
        return self._meeting.timeout_s

    @property
    def store(self) -> dist.Store:
        return self._meeting.store

    def put(self, key: str, value: str | bytes = b"1") -> None:
        self._meeting.values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str, what: str) -> bytes:
        self.wait_until(lambda: key in self._meeting.values, what)
        return self._meeting.values[key]

    def meet(self, key: str, num_ends: int, what: str) -> None:
        with self._meeting.lock:
            self._meeting.counts[key] += 1
        self.wait_until(lambda: self._meeting.counts[key] >= num_ends, what)

    def wait_until(self, condition: Callable[[], bool], what: str, pause: Callable[[float], None] = time.sleep) -> None:
        deadline = time.monotonic() + self.timeout_s
        while not condition():
            pause(0.002)
            if self._meeting.reason:
                raise RoundStopped(self._meeting.reason)
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"waited {self.timeout_s:g} s for {what}")


class Peers:
    """A sender and receivers, each call in a thread of its own. Peers that hang are left behind, not waited for.

    Args:
        build: makes one end.
        timeout_s: deadline of every wait in the rounds of syncs.
        patience_s: deadline of every wait while the peers connect, which may start processes.
    """

    def __init__(
        self, build: Callable[[], WeightTransfer], num_receivers: int, timeout_s: float, patience_s: float
    ) -> None:
        self.timeout_s = timeout_s
        self.patience_s = patience_s
        self.transfers = [build() for _ in range(num_receivers + 1)]

    @property
    def sender(self) -> WeightTransfer:
        return self.transfers[0]

    @property
    def receivers(self) -> Sequence[WeightTransfer]:
        return self.transfers[1:]

    def meeting(self) -> Meeting:
        return Meeting(self.timeout_s)

    def connect(self) -> None:
        meeting = Meeting(self.patience_s)
        self.wait_for([self.connecting(index, meeting) for index in range(len(self.transfers))])

    def connecting(self, index: int, meeting: Meeting) -> Future[None]:
        num_receivers, transfer = len(self.receivers), self.transfers[index]
        return in_thread(lambda: transfer.connect(meeting.round(), index, num_receivers, "127.0.0.1"))

    def sync(self, buckets: Sequence[Pieces], *, late_s: float = 0.0) -> list[list[list[torch.Tensor]]]:
        """One sync of all buckets, as a worker does it: a bucket is freed once all receivers have loaded it, and the
        next is received while the last is loaded.

        Args:
            late_s: receivers ask for each bucket so much later.

        Returns:
            copies of the pieces by receiver and bucket, each taken at the last moment at which they must be there.
        """
        meeting = self.meeting()
        threads: list[Future[Any]] = [in_thread(lambda: self._send(meeting, buckets))]
        received: list[Future[list[list[torch.Tensor]]]] = []
        for transfer in self.receivers:
            received.append(in_thread(partial(_receive, meeting, transfer, buckets, late_s)))
        self.wait_for([*threads, *received])
        return [future.result() for future in received]

    def _send(self, meeting: Meeting, buckets: Sequence[Pieces]) -> None:
        round_, num_receivers = meeting.round(), len(self.receivers)

        def free(number: int) -> None:
            key = f"loaded {number}"
            round_.wait_until(lambda: meeting.counts[key] == num_receivers, "all receivers")
            self.sender.free(number)

        for number, pieces in enumerate(buckets):
            if number >= DEPTH:
                free(number - DEPTH)
            if pieces:
                self.sender.send(round_, number, pieces)
        for number in range(max(len(buckets) - DEPTH, 0), len(buckets)):
            free(number)

    def close(self) -> None:
        """Close all peers, each in a thread: they must not wait for each other. Raises what they raise."""
        self.wait_for([in_thread(transfer.close) for transfer in self.transfers])

    def wait_for(self, futures: Sequence[Future[Any]]) -> None:
        """Raises what the first one that failed has raised, or TimeoutError well after the deadline of all waits."""
        wait_for(futures, max(self.timeout_s, self.patience_s) + 15)


def _receive(
    meeting: Meeting, transfer: WeightTransfer, buckets: Sequence[Pieces], late_s: float
) -> list[list[torch.Tensor]]:
    round_ = meeting.round()
    coming: list[Pieces] = []
    copies: list[list[torch.Tensor]] = []

    def load() -> None:
        copies.append([piece.clone() for piece in coming.pop(0)])
        with meeting.lock:
            meeting.counts[f"loaded {len(copies) - 1}"] += 1

    for number, pieces in enumerate(buckets):
        time.sleep(late_s)
        sizes = [len(piece) for piece in pieces]
        coming.append(transfer.receive(round_, number, sizes) if pieces else [])
        if number:
            load()
    if coming:
        load()
    return copies


def in_thread(call: Callable[[], T]) -> Future[T]:
    """Run it in a thread of its own, which the process does not wait for at its end."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def wait_for(futures: Sequence[Future[Any]], timeout_s: float) -> None:
    """Raises what the first one that failed has raised, or TimeoutError."""
    deadline = time.monotonic() + timeout_s
    waiting = list(futures)
    while waiting:
        for future in [each for each in waiting if each.done()]:
            future.result()
            waiting.remove(future)
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(waiting)} of {len(futures)} calls did not return within {timeout_s:g} s")
        time.sleep(0.002)


def outcome(future: Future[Any], timeout_s: float) -> BaseException | None:
    """What the call raised, or None where it returned. Raises TimeoutError where it did neither in time."""
    return future.exception(timeout_s)


def bucket_of(*sizes: int, seed: int = 0) -> list[torch.Tensor]:
    """Random pieces of so many bytes."""
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=random) for size in sizes]


class TransferBase(Conformance):
    """What all tests of transfers have.

    Attributes:
        patience_s: deadline of waits that are to succeed, seconds: of a transfer that starts processes, longer.
    """

    patience_s: ClassVar[float] = 15.0
    kind: ClassVar[Kind] = "transfer"

    @contextmanager
    def peers(
        self, num_receivers: int = 1, *, connected: bool = True, timeout_s: float | None = None
    ) -> Iterator[Peers]:
        """Peers of the transfer under test; they are closed at the end.

        Args:
            timeout_s: deadline of every wait but those of connecting; None for patience_s.
        """
        subject = self.subject()
        peers = Peers(subject.build, num_receivers, timeout_s or self.patience_s, self.patience_s)
        try:
            if connected:
                peers.connect()
            yield peers
        finally:
            peers.close()
