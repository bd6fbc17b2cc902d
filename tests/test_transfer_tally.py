"""The bookkeeping of a sync's buckets: what it costs the store, and whom it names."""

from __future__ import annotations

import pytest

from benchmarks._store_load import CountingStore, measure_store
from core.errors import DeadlineExceeded
from manymesh.workers.transfer.channel import Channel
from manymesh.workers.transfer.tally import BLOCK, Tally

NUM_RECEIVERS = 2 * BLOCK + 5


def test_each_receiver_notes_a_bucket_by_one_operation_and_the_sender_names_those_that_have_not() -> None:
    channel = Channel.serve("127.0.0.1", 0.3)
    far = Channel.join(channel.address, 20)
    far.store = store = CountingStore(far.store)
    sender, receiver = Tally(channel.round("sync"), NUM_RECEIVERS), Tally(far.round("sync"), NUM_RECEIVERS)
    late = {1, BLOCK, BLOCK + 1, NUM_RECEIVERS}
    receiver.introduce(BLOCK, "rank 61 of group 'rollouts'")
    store.count = 0
    for index in set(range(1, NUM_RECEIVERS + 1)) - late:
        receiver.note(0, index)
    assert store.count == NUM_RECEIVERS - len(late)
    names = f"receiver 1, rank 61 of group 'rollouts', receiver {BLOCK + 1}, receiver {NUM_RECEIVERS}"
    with pytest.raises(DeadlineExceeded, match=f"to load bucket 0; it is not loaded by {names}$"):
        sender.wait(0)
    for index in late:
        receiver.note(0, index)
    sender.wait(0)


def test_a_rounds_keys_are_all_known_and_can_be_forgotten() -> None:
    channel = Channel.serve("127.0.0.1", 20)
    round_ = channel.round("sync")
    tally, before = Tally(round_, 70), channel.store.num_keys()
    for index in range(1, 71):
        tally.introduce(index, f"rank {index}")
        for number in range(3):
            tally.note(number, index)
    Channel.join(channel.address, 20).round("sync").forget(tally.keys(3))
    assert channel.store.num_keys() == before


def test_the_benchmark_of_the_store_counts_one_operation_a_receiver_and_bucket() -> None:
    figures = measure_store(20, 5)
    assert figures["receivers' operations"] == 20
    assert figures["ms"] > 0
