"""The sending end of a transfer: from the trainer's stream of tensors to buckets on their way.

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

import attrs
import torch

from core.engine import WeightSpec
from manymesh.workers.transfer.buckets import NamedTensor, fill_buckets, plan
from manymesh.workers.transfer.channel import Round
from manymesh.workers.transfer.digest import digest, stack_digests
from manymesh.workers.transfer.endpoint import DEPTH, Endpoint, Receipt
from manymesh.workers.transfer.streams import follow, mark
from manymesh.workers.transfer.tally import Tally


class Sender(Endpoint):
    """The one rank of the trainer that holds full tensors."""

    _before: tuple[Round, Tally, int] | None = None  # the last round, and its number of buckets

    def send(
        self, specs: Sequence[WeightSpec], stream: Iterator[NamedTensor], round_name: str, version: int
    ) -> Receipt:
        """Send all tensors. The stream is read to its end whatever the link does, since other ranks of the trainer
        wait in its collectives; what the stream raises is raised."""
        self._forget_last_round()
        round_, buckets = self._channel.round(round_name), plan(specs, self._bucket_bytes)
        tally = Tally(round_, self._num_receivers)
        self._before = round_, tally, len(buckets)
        start, receipt = time.perf_counter(), Receipt(self._name, version, len(specs))
        digests: list[torch.Tensor] = []

        def note(tensor: torch.Tensor) -> None:
            digests.append(digest(tensor))

        wait_s, error = 0.0, None
        on_its_way: Future[None] | None = None
        with ThreadPoolExecutor(1, "weights") as link:
            try:
                for number, pieces in enumerate(fill_buckets(specs, buckets, stream, note)):
                    if error is not None:
                        continue
                    start_of_wait = time.perf_counter()
                    try:
                        if on_its_way is not None:
                            on_its_way.result()
                        exported = mark(self._device)
                        on_its_way = link.submit(self._hand_over, round_, tally, number, pieces, exported)
                    except Exception as failure:
                        error = failure
                        receipt = self._failed(receipt, round_, failure)
                    wait_s += time.perf_counter() - start_of_wait
            except BaseException as failure:  # the trainer's own
                round_.stop(f"{self._name}: {type(failure).__name__}: {failure}")
                raise
            if error is not None:
                return receipt
            try:
                start_of_wait = time.perf_counter()
                if on_its_way is not None:
                    on_its_way.result()
                table = stack_digests(digests)
                round_.put("digests", table.numpy().tobytes())
                round_.verdict("the receivers' word that all has arrived")
                for number in range(max(len(buckets) - DEPTH, 0), len(buckets)):
                    self._transfer.free(number)
            except Exception as failure:
                return self._failed(receipt, round_, failure)
        now = time.perf_counter()
        return attrs.evolve(
            receipt,
            num_bytes=sum(sum(bucket.sizes) for bucket in buckets),
            digest=int(digest(table)),
            seconds=now - start,
            waited=wait_s + now - start_of_wait,
        )

    def _forget_last_round(self) -> None:
        if self._before is not None:
            round_, tally, num_buckets = self._before
            round_.forget([*tally.keys(num_buckets), "verified", "verified.all"])

    def _hand_over(
        self, round_: Round, tally: Tally, number: int, pieces: list[torch.Tensor], exported: torch.cuda.Event | None
    ) -> None:
        round_.check()
        follow(exported, self._device)
        if number >= DEPTH:
            tally.wait(number - DEPTH)
            self._transfer.free(number - DEPTH)
        if pieces:
            self._transfer.send(round_, number, pieces)
