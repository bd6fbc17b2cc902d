"""Which receivers have loaded which buckets, at one operation of the store for each receiver and bucket."""

from __future__ import annotations

from collections.abc import Iterable

from core.errors import DeadlineExceeded
from manymesh.workers.transfer.channel import Round

BLOCK = 62  # receivers whose bits share a counter of 64 bits, with a sign


class Tally:
    """One end's view of a round. A receiver adds its bit to the counter of its block; the sender reads the counters.

    With one store for all, hundreds of receivers make its operations what a sync takes: a bucket is to cost each of
    them one, and the sender one for each block and look.
    """

    def __init__(self, round_: Round, num_receivers: int) -> None:
        self._round, self._num_receivers = round_, num_receivers
        self._waiting: dict[int, list[int]] = {}  # by bucket: blocks that were not complete at the last look

    def introduce(self, index: int, name: str) -> None:
        """Receiver `index` (from 1) says what it is called in errors."""
        self._round.put(f"name.{index}", name)

    def note(self, number: int, index: int) -> None:
        """Receiver `index` has loaded the bucket."""
        block, place = divmod(index - 1, BLOCK)
        self._round.add(f"loaded.{number}.{block}", 1 << place)

    def wait(self, number: int) -> None:
        """Return once all receivers have loaded the bucket.

        Raises:
            Stopped: the round was stopped.
            DeadlineExceeded: naming those that have not.
        """
        try:
            self._round.wait_until(lambda: self._is_complete(number), f"all receivers to load bucket {number}")
        except DeadlineExceeded as error:
            names = ((self._round.now(f"name.{index}") or b"receiver %d" % index) for index in self._missing(number))
            late = ", ".join(name.decode() for name in names)
            raise DeadlineExceeded(f"{error}; it is not loaded by {late}") from error

    def keys(self, num_buckets: int) -> Iterable[str]:
        """All that ends put into the store."""
        yield from (f"name.{index}" for index in range(1, self._num_receivers + 1))
        yield from (f"loaded.{number}.{block}" for number in range(num_buckets) for block in self._blocks())

    def _blocks(self) -> range:
        return range(-(-self._num_receivers // BLOCK))

    def _is_complete(self, number: int) -> bool:
        waiting = self._waiting.setdefault(number, list(self._blocks()))
        while waiting and not self._lacking(number, waiting[-1]):
            waiting.pop()
        return not waiting

    def _lacking(self, number: int, block: int) -> int:
        """Bits of those of a block that have not loaded the bucket."""
        size = min(BLOCK, self._num_receivers - block * BLOCK)
        return ((1 << size) - 1) & ~self._round.add(f"loaded.{number}.{block}", 0)

    def _missing(self, number: int) -> list[int]:
        indices = range(self._num_receivers)
        return [index + 1 for index in indices if self._lacking(number, index // BLOCK) >> index % BLOCK & 1]
