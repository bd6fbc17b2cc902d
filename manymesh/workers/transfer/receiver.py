"""The receiving end of a transfer: from buckets to the rollout's load_bucket. See the sender for how a sync goes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import torch

from core.engine import WeightSpec
from core.errors import ManymeshError
from core.rollout import Rollout
from manymesh.workers.transfer.buckets import BucketPlan, Joiner, plan
from manymesh.workers.transfer.channel import COMMIT, Round
from manymesh.workers.transfer.digest import digest, stack_digests
from manymesh.workers.transfer.endpoint import PATIENCE, Endpoint, Receipt
from manymesh.workers.transfer.streams import follow, keep_for_this_stream, mark
from manymesh.workers.transfer.tally import Tally


class Receiver(Endpoint):
    """A rank that holds a rollout."""

    def __init__(self, *args: Any, index: int) -> None:
        super().__init__(*args)
        self._index = index

    def receive(self, specs: Sequence[WeightSpec], rollout: Rollout, round_name: str, version: int) -> Receipt:
        """Load all tensors into a rollout that has begun its update, verify them, and finish or abort the update.

        What goes wrong on the way is in the receipt, not raised: the rollout has no valid weights then, but the group
        is healthy.
        """
        round_ = self._channel.round(round_name, PATIENCE)
        start, receipt = time.perf_counter(), Receipt(self._name, version, len(specs))
        try:
            tally = Tally(round_, self._num_receivers)
            tally.introduce(self._index, self._name)
            with ThreadPoolExecutor(1, "weights") as link:
                table, wait_s = self._load(round_, tally, link, specs, rollout)
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
        return attrs.evolve(receipt, num_bytes=size, digest=int(digest(table)), seconds=seconds, waited=wait_s)

    def _load(
        self, round_: Round, tally: Tally, link: ThreadPoolExecutor, specs: Sequence[WeightSpec], rollout: Rollout
    ) -> tuple[torch.Tensor, float]:
        buckets, joiner = plan(specs, self._bucket_bytes), Joiner(specs, self._device)
        digests: list[torch.Tensor] = []
        wait_s = 0.0
        coming = link.submit(self._take, round_, 0, buckets[0], mark(self._device)) if buckets else None
        for number, bucket in enumerate(buckets):
            assert coming is not None
            start_of_wait = time.perf_counter()
            pieces, arrived = coming.result()
            wait_s += time.perf_counter() - start_of_wait
            if number + 1 < len(buckets):  # into the buffer of the bucket before this one
                coming = link.submit(self._take, round_, number + 1, buckets[number + 1], mark(self._device))
            follow(arrived, self._device)
            keep_for_this_stream(pieces)
            try:
                round_.look()
                load = joiner.add(bucket, pieces)
                digests += [digest(tensor) for _, tensor in load]
                if load:
                    rollout.load_bucket(load)
            except Exception as error:
                self._failed(Receipt(self._name, 0), round_, error)  # at once: the link's thread waits for the next
                raise
            del load, pieces  # views of a buffer that is used again
            tally.note(number, self._index)
        return stack_digests(digests), wait_s

    def _take(
        self, round_: Round, number: int, bucket: BucketPlan, loaded: torch.cuda.Event | None
    ) -> tuple[Sequence[torch.Tensor], torch.cuda.Event | None]:
        """The pieces, and the event behind their copies.

        Args:
            loaded: behind all loads of earlier buckets.
        """
        follow(loaded, self._device)
        pieces = self._transfer.receive(round_, number, bucket.sizes) if bucket.sizes else []
        return [piece.to(self._device) for piece in pieces], mark(self._device)

    def _verify(self, round_: Round, specs: Sequence[WeightSpec], table: torch.Tensor) -> None:
        data = round_.get("digests", "the sender's digests")
        want = torch.frombuffer(bytearray(data), dtype=torch.int64) if data else table[:0]
        wrong = [spec.name for spec, ok in zip(specs, (want == table).tolist(), strict=True) if not ok]
        if wrong:
            raise ManymeshError(
                f"{len(wrong)} of {len(specs)} tensors did not arrive as they were sent",
                have=f"other digests of {wrong[:8]}",
                mend="sync again; if it happens again, look at the network and at the kind of transfer",
            )
