"""The two ends of a transfer: what every kind has in common, from the trainer's stream to the rollout's load_bucket.

One sync is a round. The sender exports, cuts and hands over buckets; each receiver joins and loads them and checks
digests; when all have verified everything, all commit together, else none does. A failure of any end stops the round
for all others, so that nobody sits in a broadcast until its deadline.

The next bucket is exported while the last is on its way, and the next is received while the last is loaded: the link
runs in a thread of its own on both sides (it waits outside of Python's lock), and may be DEPTH buckets ahead of the
slowest receiver.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import attrs
import torch

from core.engine import WeightSpec
from core.errors import DeadlineExceeded, ManymeshError
from core.rollout import Rollout
from core.transfer import WeightTransfer
from manymesh.workers.transfer.buckets import Bucket, Joiner, Named, cut, plan
from manymesh.workers.transfer.channel import COMMIT, Channel, Round, Stopped
from manymesh.workers.transfer.digest import digest, stacked

DEPTH = 2  # buckets that exist at a time
# A receiver waits this many times as long as the sender, which can say who is late: a receiver just hears nothing more.
PATIENCE = 1.5


@attrs.frozen
class Receipt:
    """What one end says of a round.

    Attributes:
        end: "sender", or which receiver.
        digest: of all tensors' digests, for the log.
        error: why it did not commit; "" when it did. `echo`: only because another end had stopped.
        seconds: at this end. `waited`: of these, for the link.
    """

    end: str
    version: int
    num_tensors: int = 0
    num_bytes: int = 0
    digest: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    error: str = ""
    echo: bool = False


class _End:
    """What both ends have."""

    def __init__(
        self, channel: Channel, transfer: WeightTransfer, name: str, num_receivers: int, bucket_bytes: int
    ) -> None:
        self.channel, self.transfer = channel, transfer
        self._name, self._num_receivers, self._bucket_bytes = name, num_receivers, bucket_bytes

    def close(self) -> None:
        self.transfer.close()

    def _failed(self, receipt: Receipt, round_: Round, error: Exception) -> Receipt:
        """Stop the round for all; the receipt says why."""
        said = str(error) if isinstance(error, ManymeshError) else f"{type(error).__name__}: {error}"
        try:
            round_.stop(f"{self._name}: {said}")
        except Exception:  # the store is gone, and with it the round
            said = f"{said} (and the sender is gone)"
        return attrs.evolve(receipt, error=said, echo=isinstance(error, Stopped))


class SendingEnd(_End):
    """The one rank of the trainer that holds full tensors."""

    _before: tuple[Round, int] | None = None  # the last round, and its number of buckets

    def send(self, specs: Sequence[WeightSpec], stream: Iterator[Named], round_name: str, version: int) -> Receipt:
        """Send all tensors. The stream is read to its end whatever the link does, since other ranks of the trainer
        wait in its collectives; what the stream raises is raised."""
        self._forget_last_round()
        round_, buckets = self.channel.round(round_name), plan(specs, self._bucket_bytes)
        self._before = round_, len(buckets)
        start, receipt = time.perf_counter(), Receipt(self._name, version, len(specs))
        digests: list[torch.Tensor] = []
        waited, error = 0.0, None
        on_its_way: Future[None] | None = None
        with ThreadPoolExecutor(1, "weights") as link:
            try:
                for number, pieces in enumerate(cut(specs, buckets, stream, lambda each: digests.append(digest(each)))):
                    if error is not None:
                        continue
                    begun = time.perf_counter()
                    try:
                        if on_its_way is not None:
                            on_its_way.result()
                        on_its_way = link.submit(self._hand_over, round_, number, pieces)
                    except Exception as failure:
                        error = failure
                        receipt = self._failed(receipt, round_, failure)
                    waited += time.perf_counter() - begun
            except BaseException as failure:  # the trainer's own
                round_.stop(f"{self._name}: {type(failure).__name__}: {failure}")
                raise
            if error is not None:
                return receipt
            try:
                begun = time.perf_counter()
                if on_its_way is not None:
                    on_its_way.result()
                table = stacked(digests)
                round_.put("digests", table.numpy().tobytes())
                round_.verdict("the receivers' word that all has arrived")
                for number in range(max(len(buckets) - DEPTH, 0), len(buckets)):
                    self.transfer.free(number)
            except Exception as failure:
                return self._failed(receipt, round_, failure)
        now = time.perf_counter()
        return attrs.evolve(
            receipt,
            num_bytes=sum(sum(bucket.sizes) for bucket in buckets),
            digest=int(digest(table)),
            seconds=now - start,
            waited=waited + now - begun,
        )

    def _forget_last_round(self) -> None:
        if self._before is not None:
            round_, num_buckets = self._before
            counted = [f"loaded.{number}" for number in range(num_buckets)] + ["verified"]
            at = [f"at.{index}" for index in range(1, self._num_receivers + 1)]
            round_.forget([*at, *counted, *(f"{key}.all" for key in counted)])

    def _hand_over(self, round_: Round, number: int, pieces: list[torch.Tensor]) -> None:
        round_.check()
        if number >= DEPTH:
            self._all_have_loaded(round_, number - DEPTH)
            self.transfer.free(number - DEPTH)
        if pieces:
            self.transfer.send(round_, number, pieces)

    def _all_have_loaded(self, round_: Round, number: int) -> None:
        try:
            round_.all_counted(f"loaded.{number}", f"all receivers to load bucket {number}")
        except DeadlineExceeded as error:
            behind = []
            for index in range(1, self._num_receivers + 1):
                last, _, name = (round_.now(f"at.{index}") or b"-1 receiver %d" % index).decode().partition(" ")
                behind += [name] if int(last) < number else []
            raise DeadlineExceeded(f"{error}; it is not loaded by {', '.join(behind)}") from error


class ReceivingEnd(_End):
    """A rank that holds a rollout."""

    def __init__(self, *args: Any, index: int, device: torch.device) -> None:
        super().__init__(*args)
        self._index, self._device = index, device

    def receive(self, specs: Sequence[WeightSpec], rollout: Rollout, round_name: str, version: int) -> Receipt:
        """Load all tensors into a rollout that has begun its update, verify them, and finish or abort the update.

        What goes wrong on the way is in the receipt, not raised: the rollout has no valid weights then, but the group
        is healthy.
        """
        round_ = self.channel.round(round_name, PATIENCE)
        start, receipt = time.perf_counter(), Receipt(self._name, version, len(specs))
        try:
            self._at(round_, -1)
            with ThreadPoolExecutor(1, "weights") as link:
                table, waited = self._load(round_, link, specs, rollout)
            self._verify(round_, specs, table)
            if round_.count_in("verified", self._num_receivers):
                round_.decide(COMMIT)
            round_.verdict("the other receivers' word that all has arrived")
        except Exception as error:
            rollout.abort_weight_update()
            return self._failed(receipt, round_, error)
        rollout.finish_weight_update()
        size = sum(sum(bucket.sizes) for bucket in plan(specs, self._bucket_bytes))
        seconds = time.perf_counter() - start
        return attrs.evolve(receipt, num_bytes=size, digest=int(digest(table)), seconds=seconds, waited=waited)

    def _load(
        self, round_: Round, link: ThreadPoolExecutor, specs: Sequence[WeightSpec], rollout: Rollout
    ) -> tuple[torch.Tensor, float]:
        buckets, joiner = plan(specs, self._bucket_bytes), Joiner(specs, self._device)
        digests: list[torch.Tensor] = []
        waited = 0.0
        coming = link.submit(self._take, round_, 0, buckets[0]) if buckets else None
        for number, bucket in enumerate(buckets):
            assert coming is not None
            begun = time.perf_counter()
            pieces = coming.result()
            waited += time.perf_counter() - begun
            if number + 1 < len(buckets):
                coming = link.submit(self._take, round_, number + 1, buckets[number + 1])
            try:
                round_.check()
                load = joiner.add(bucket, pieces)
                digests += [digest(tensor) for _, tensor in load]
                if load:
                    rollout.load_bucket(load)
            except Exception as error:
                self._failed(Receipt(self._name, 0), round_, error)  # at once: the link's thread waits for the next
                raise
            del load, pieces  # views of a buffer that is used again
            self._at(round_, number)
            round_.count_in(f"loaded.{number}", self._num_receivers)
        return stacked(digests), waited

    def _at(self, round_: Round, number: int) -> None:
        round_.put(f"at.{self._index}", f"{number} {self._name}")

    def _take(self, round_: Round, number: int, bucket: Bucket) -> Sequence[torch.Tensor]:
        pieces = self.transfer.receive(round_, number, bucket.sizes) if bucket.sizes else []
        return [piece.to(self._device) for piece in pieces]

    def _verify(self, round_: Round, specs: Sequence[WeightSpec], table: torch.Tensor) -> None:
        sent = round_.get("digests", "the sender's digests")
        want = torch.frombuffer(bytearray(sent), dtype=torch.int64) if sent else table[:0]
        wrong = [spec.name for spec, ok in zip(specs, (want == table).tolist(), strict=True) if not ok]
        if wrong:
            raise ManymeshError(
                f"{len(wrong)} of {len(specs)} tensors did not arrive as they were sent",
                have=f"other digests of {wrong[:8]}",
                mend="sync again; if it happens again, look at the network and at the kind of transfer",
            )
