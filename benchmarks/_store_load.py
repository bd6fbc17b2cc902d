"""What many receivers ask of one store during a sync: each is a thread with a connection of its own, and no byte of a
weight travels."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from manymesh.workers.transfer.channel import Channel
from manymesh.workers.transfer.endpoint import DEPTH
from manymesh.workers.transfer.tally import Tally


class CountingStore:
    """A store that counts its operations."""

    def __init__(self, store: Any) -> None:
        self._store, self.count = store, 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = getattr(self._store, name)

        def counted(*args: Any) -> Any:
            self.count += 1
            return operation(*args)

        return counted


def measure_store(num_receivers: int, num_buckets: int) -> dict[str, float]:
    """One sync's bookkeeping: a bucket is announced, all receivers note it, the sender waits for those before the last.

    Returns:
        operations of all receivers and of the sender, and milliseconds, each by bucket.
    """
    channel = Channel.serve("127.0.0.1", 120)
    with ThreadPoolExecutor(32) as pool:
        receivers = list(pool.map(lambda _: Channel.join(channel.address, 120), range(num_receivers)))
    stores = [CountingStore(each.store) for each in (channel, *receivers)]
    for each, store in zip((channel, *receivers), stores, strict=True):
        each.store = store
    sent = [threading.Event() for _ in range(num_buckets)]  # in place of a broadcast

    def receive(index: int) -> None:
        tally = Tally(receivers[index - 1].round("sync"), num_receivers)
        for number in range(num_buckets):
            sent[number].wait()
            tally.note(number, index)

    threads = [threading.Thread(target=receive, args=(index,)) for index in range(1, num_receivers + 1)]
    for thread in threads:
        thread.start()
    tally, start = Tally(channel.round("sync"), num_receivers), time.perf_counter()
    for number in range(num_buckets):
        if number >= DEPTH:
            tally.wait(number - DEPTH)
        sent[number].set()
    for number in range(max(num_buckets - DEPTH, 0), num_buckets):
        tally.wait(number)
    seconds = time.perf_counter() - start
    for thread in threads:
        thread.join()
    return {
        "receivers' operations": sum(store.count for store in stores[1:]) / num_buckets,
        "sender's operations": stores[0].count / num_buckets,
        "ms": 1e3 * seconds / num_buckets,
    }
