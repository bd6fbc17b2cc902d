"""Faults of weight transfers, put into the one by files. Most know the protocol alone."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from core.transfer import TransferRound
from sdk.conformance import TransferConformance
from sdk.conformance.suites.transfer_base import Pieces
from tests.sdk.kit.faults import Fault, caught_by

HANG_S = 10.0  # of a fault that waits too long; longer than the suite's patience


class DiskConformance(TransferConformance):
    """The suite on the transfer that the faults are put into."""

    backend = "disk"
    config: ClassVar = {"directory": str(Path(tempfile.gettempdir(), "manymesh-faults"))}


@caught_by("test_buckets_arrive_in_order_and_to_the_byte")
class SwapsPieces(Fault):
    """gives a bucket's pieces in another order"""

    def receive(self, round_: TransferRound, number: int, sizes: Sequence[int]) -> Pieces:
        return list(super().receive(round_, number, sizes))[::-1]  # type: ignore[misc]


@caught_by("test_buckets_arrive_in_order_and_to_the_byte", "test_a_connected_transfer_serves_many_syncs")
class IsLate(Fault):
    """gives the bucket before where it has the same sizes"""

    _last: Any = None

    def receive(self, round_: TransferRound, number: int, sizes: Sequence[int]) -> Pieces:
        pieces = super().receive(round_, number, sizes)  # type: ignore[misc]
        last, self._last = self._last, [piece.clone() for piece in pieces]
        is_alike = number and last and [len(piece) for piece in last] == list(sizes)
        answer: Pieces = last if is_alike else pieces
        return answer


@caught_by("test_buckets_arrive_in_order_and_to_the_byte")
class ChangesAByte(Fault):
    """changes the last byte of what is long"""

    def receive(self, round_: TransferRound, number: int, sizes: Sequence[int]) -> Pieces:
        pieces = [piece.clone() for piece in super().receive(round_, number, sizes)]  # type: ignore[misc]
        for piece in pieces:
            if len(piece) > 100_000:
                piece[-1] ^= 1
        return pieces


@caught_by("test_buckets_arrive_in_order_and_to_the_byte[3]")
class ForgetsReceivers(Fault):
    """gives zeros to all receivers but the first"""

    _index = 0

    def connect(self, round_: TransferRound, index: int, num_receivers: int, host: str) -> None:
        self._index = index
        super().connect(round_, index, num_receivers, host)  # type: ignore[misc]

    def receive(self, round_: TransferRound, number: int, sizes: Sequence[int]) -> Pieces:
        pieces: Pieces = super().receive(round_, number, sizes)  # type: ignore[misc]
        return pieces if self._index == 1 else [torch.zeros_like(piece) for piece in pieces]


@caught_by("test_pieces_are_flat_bytes_on_the_device_that_was_asked_for")
class KeepsAnAxis(Fault):
    """gives pieces of two dims"""

    def receive(self, round_: TransferRound, number: int, sizes: Sequence[int]) -> Pieces:
        return [piece[None] for piece in super().receive(round_, number, sizes)]  # type: ignore[misc]


@caught_by("test_the_senders_pieces_stay_as_they_are")
class WipesWhatItSent(Fault):
    """writes zeros over what it has sent"""

    def send(self, round_: TransferRound, number: int, pieces: Pieces) -> None:
        super().send(round_, number, pieces)  # type: ignore[misc]
        for piece in pieces:
            piece.zero_()


@caught_by("test_a_received_bucket_stays_as_it_is_until_the_one_after_next_is_asked_for")
class HasOneBuffer(Fault):
    """receives every bucket into one buffer"""

    _one: torch.Tensor | None = None

    def receive(self, round_: TransferRound, number: int, sizes: Sequence[int]) -> Pieces:
        flat = torch.cat(list(super().receive(round_, number, sizes)))  # type: ignore[misc]
        if self._one is None or len(self._one) < len(flat):
            self._one = torch.empty_like(flat)
        self._one[: len(flat)] = flat
        pieces: Pieces = self._one[: len(flat)].split(list(sizes))
        return pieces


@caught_by("test_a_bucket_that_is_not_yet_freed_stays_whole_however_late_it_is_asked_for")
class HasOneFile(Fault):
    """keeps one bucket, and writes the next over it before it was freed"""

    def _path(self, number: int) -> Path:
        path: Path = super()._path(0)  # type: ignore[misc]
        return path

    def free(self, number: int) -> None:
        """The file is written again."""


@caught_by("test_a_bucket_without_bytes_is_left_out")
class CountsOn(Fault):
    """waits for buckets without bytes"""

    def send(self, round_: TransferRound, number: int, pieces: Pieces) -> None:
        super().send(round_, number, pieces)  # type: ignore[misc]
        round_.put(f"sent {number}")

    def receive(self, round_: TransferRound, number: int, sizes: Sequence[int]) -> Pieces:
        if number:
            round_.get(f"sent {number - 1}", "the bucket before")
        pieces: Pieces = super().receive(round_, number, sizes)  # type: ignore[misc]
        return pieces


@caught_by("test_a_connected_transfer_serves_many_syncs")
class RemembersBuckets(Fault):
    """gives in a second sync what the first had under a bucket's number"""

    _known: dict[int, Any]

    def receive(self, round_: TransferRound, number: int, sizes: Sequence[int]) -> Pieces:
        pieces = super().receive(round_, number, sizes)  # type: ignore[misc]
        cache = vars(self).setdefault("_known", {})
        return cache.setdefault(number, [piece.clone() for piece in pieces])  # type: ignore[no-any-return]


@caught_by("test_two_transfers_at_a_time_keep_apart")
class HasOneName(Fault):
    """has one place for all transfers on a machine"""

    def connect(self, round_: TransferRound, index: int, num_receivers: int, host: str) -> None:
        super().connect(round_, index, num_receivers, host)  # type: ignore[misc]
        self._directory = self._root / "weights"
        self._directory.mkdir(parents=True, exist_ok=True)


class Deaf:
    """A round whose waits neither end at the deadline nor hear of a stop."""

    def __init__(self, round_: TransferRound) -> None:
        self._round = round_

    def __getattr__(self, name: str) -> Any:
        return getattr(self._round, name)

    def get(self, key: str, what: str) -> bytes:
        end = time.monotonic() + HANG_S
        while time.monotonic() < end:
            try:
                return self._round.get(key, what)
            except Exception:
                time.sleep(0.05)
        raise TimeoutError

    def wait_until(self, condition: Callable[[], bool], what: str, pause: Callable[[float], None] = time.sleep) -> None:
        end = time.monotonic() + HANG_S
        while not condition() and time.monotonic() < end:
            pause(0.01)


@caught_by(
    "test_a_receiver_waits_for_a_bucket_until_the_deadline",
    "test_a_round_that_is_stopped_ends_all_waits_and_the_ends_can_be_closed[receiver]",
)
class WaitsByItself(Fault):
    """waits for a bucket by itself, and hears of no deadline and no stop"""

    def receive(self, round_: TransferRound, number: int, sizes: Sequence[int]) -> Pieces:
        pieces: Pieces = super().receive(Deaf(round_), number, sizes)  # type: ignore[misc]
        return pieces


@caught_by("test_a_receiver_waits_for_the_sender_until_the_deadline")
class ConnectsByItself(Fault):
    """waits for the sender by itself, and hears of no deadline"""

    def connect(self, round_: TransferRound, index: int, num_receivers: int, host: str) -> None:
        super().connect(Deaf(round_), index, num_receivers, host)  # type: ignore[misc]


@caught_by("test_a_sender_waits_for_no_receiver_beyond_the_deadline")
class WaitsForReceivers(Fault):
    """has the sender wait for receivers beyond the deadline"""

    def send(self, round_: TransferRound, number: int, pieces: Pieces) -> None:
        super().send(round_, number, pieces)  # type: ignore[misc]
        Deaf(round_).get(f"taken {number}", "the receivers")

    def receive(self, round_: TransferRound, number: int, sizes: Sequence[int]) -> Pieces:
        pieces: Pieces = super().receive(round_, number, sizes)  # type: ignore[misc]
        round_.put(f"taken {number}")
        return pieces


@caught_by("test_a_receiver_waits_for_a_bucket_until_the_deadline")
class GivesUpAtOnce(Fault):
    """gives up on a bucket that is not there yet"""

    def receive(self, round_: TransferRound, number: int, sizes: Sequence[int]) -> Pieces:
        if not self._path(number).is_file():
            raise FileNotFoundError(number)
        pieces: Pieces = super().receive(round_, number, sizes)  # type: ignore[misc]
        return pieces


@caught_by("test_a_round_that_is_stopped_ends_all_waits_and_the_ends_can_be_closed")
class ClosesSlowly(Fault):
    """waits for its peers in close"""

    def close(self) -> None:
        if self._directory is not None:
            time.sleep(HANG_S / 2)
        super().close()  # type: ignore[misc]


@caught_by("test_an_end_can_be_closed_twice_and_before_it_is_connected")
class ClosesOnce(Fault):
    """cannot be closed twice"""

    def close(self) -> None:
        (self._directory / "closed").touch()
        super().close()  # type: ignore[misc]


@caught_by("test_process_wide_state_is_left_as_it_was")
class OpensAWorld(Fault):
    """opens the process's default world of torch.distributed"""

    def connect(self, round_: TransferRound, index: int, num_receivers: int, host: str) -> None:
        super().connect(round_, index, num_receivers, host)  # type: ignore[misc]
        if index == 0 and not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            self._opened = True

    def close(self) -> None:
        super().close()  # type: ignore[misc]
        if vars(self).pop("_opened", False):
            dist.destroy_process_group()


@caught_by("test_process_wide_state_is_left_as_it_was")
class SetsTheEnvironment(Fault):
    """sets an environment variable"""

    def connect(self, round_: TransferRound, index: int, num_receivers: int, host: str) -> None:
        super().connect(round_, index, num_receivers, host)  # type: ignore[misc]
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"

    def close(self) -> None:
        super().close()  # type: ignore[misc]
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
