"""Buckets of bytes from a sender to receivers: whole, in order, in time, and nothing left when it goes wrong."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future

import pytest
import torch
import torch.distributed as dist

from sdk.conformance.process_state import left_behind, process_state, restore
from sdk.conformance.suites.transfer_base import SLACK_S, Pieces, TransferBase, bucket_of, in_thread, outcome


def assert_received(answers: Sequence[Sequence[Pieces]], buckets: Sequence[Pieces]) -> None:
    """Every receiver has every bucket to the byte."""
    for receiver, buckets_of_receiver in enumerate(answers, 1):
        assert len(buckets_of_receiver) == len(buckets)
        for number, (pieces, want_pieces) in enumerate(zip(buckets_of_receiver, buckets, strict=True)):
            where = f"bucket {number} at receiver {receiver}"
            assert [len(piece) for piece in pieces] == [len(piece) for piece in want_pieces], f"{where}: other sizes"
            for place, (piece, want) in enumerate(zip(pieces, want_pieces, strict=True)):
                assert torch.equal(piece.cpu(), want), f"{where}, piece {place}: other bytes than were sent"


class TransferSuite(TransferBase):
    """One sender and its receivers are threads of one process here, and the round is the kit's own."""

    @pytest.mark.parametrize("num_receivers", [1, 3])
    def test_buckets_arrive_in_order_and_to_the_byte(self, num_receivers: int) -> None:
        buckets = [bucket_of(1000, 24, seed=seed) for seed in range(5)]
        buckets += [bucket_of(1, 3, 17, 4096, seed=5), bucket_of(100_003, seed=6), bucket_of(8, seed=7)]
        with self.peers(num_receivers) as peers:
            assert_received(peers.sync(buckets), buckets)

    def test_pieces_are_flat_bytes_on_the_device_that_was_asked_for(self) -> None:
        with self.peers() as peers:
            meeting = peers.meeting()
            sending = in_thread(lambda: peers.sender.send(meeting.round(), 0, bucket_of(5, 11)))
            receiving = in_thread(lambda: peers.receivers[0].receive(meeting.round(), 0, [5, 11]))
            peers.wait_for([sending, receiving])
            pieces = receiving.result()
        assert [(piece.dtype, tuple(piece.shape)) for piece in pieces] == [(torch.uint8, (5,)), (torch.uint8, (11,))]
        assert {piece.device.type for piece in pieces} == {self.device}

    def test_the_senders_pieces_stay_as_they_are(self) -> None:
        buckets = [bucket_of(100, 50, seed=seed) for seed in range(4)]
        before = [[piece.clone() for piece in pieces] for pieces in buckets]
        with self.peers() as peers:
            peers.sync(buckets)
        for pieces, copies in zip(buckets, before, strict=True):
            assert all(map(torch.equal, pieces, copies)), "the transfer wrote to what it was given to send"

    def test_a_received_bucket_stays_as_it_is_until_the_one_after_next_is_asked_for(self) -> None:
        first, second = bucket_of(64, 64, seed=1), bucket_of(64, 64, seed=2)
        with self.peers() as peers:
            meeting = peers.meeting()

            def send() -> None:
                for number, pieces in enumerate((first, second)):
                    peers.sender.send(meeting.round(), number, pieces)

            def receive() -> list[Pieces]:
                return [peers.receivers[0].receive(meeting.round(), number, [64, 64]) for number in (0, 1)]

            sending, receiving = in_thread(send), in_thread(receive)
            peers.wait_for([sending, receiving])
            assert_received([receiving.result()], [first, second])

    def test_a_bucket_that_is_not_yet_freed_stays_whole_however_late_it_is_asked_for(self) -> None:
        buckets = [bucket_of(500, seed=seed) for seed in range(4)]
        with self.peers(2) as peers:
            assert_received(peers.sync(buckets, late_s=0.1), buckets)

    def test_a_bucket_without_bytes_is_left_out(self) -> None:
        buckets = [[], bucket_of(10, seed=1), [], [], bucket_of(20, seed=2), []]
        with self.peers(2) as peers:
            assert_received(peers.sync(buckets), buckets)

    def test_a_connected_transfer_serves_many_syncs(self) -> None:
        with self.peers(2) as peers:
            for seed, size in enumerate((100, 5000, 30)):
                buckets = [bucket_of(size, size + 1, seed=10 * seed + number) for number in range(3)]
                assert_received(peers.sync(buckets), buckets)

    def test_two_transfers_at_a_time_keep_apart(self) -> None:
        ours = [bucket_of(300, seed=number) for number in range(3)]
        theirs = [bucket_of(300, seed=100 + number) for number in range(3)]
        with self.peers() as one, self.peers() as other:
            syncs = [in_thread(lambda: one.sync(ours, late_s=0.05)), in_thread(lambda: other.sync(theirs))]
            one.wait_for(syncs)
            assert_received(syncs[0].result(), ours)
            assert_received(syncs[1].result(), theirs)

    def test_a_receiver_waits_for_a_bucket_until_the_deadline(self) -> None:
        with self.peers(timeout_s=1.0) as peers:
            start = time.monotonic()
            error = outcome(
                in_thread(lambda: peers.receivers[0].receive(peers.meeting().round(), 0, [10])), 1 + SLACK_S
            )
            assert isinstance(error, Exception), "receive returned what nobody had sent"
            assert time.monotonic() - start > 0.9, "the deadline is the round's"

    def test_a_receiver_waits_for_the_sender_until_the_deadline(self) -> None:
        with self.peers(connected=False, timeout_s=1.0) as peers:
            error = outcome(peers.connecting(1, peers.meeting()), 1 + SLACK_S)
            assert isinstance(error, Exception), "it is connected, and to nobody"

    def test_a_sender_waits_for_no_receiver_beyond_the_deadline(self) -> None:
        """It may also send without one: a store holds what is sent."""
        with self.peers(connected=False, timeout_s=1.0) as peers:
            outcome(peers.connecting(0, peers.meeting()), 1 + SLACK_S)
        with self.peers(timeout_s=1.0) as peers:
            outcome(in_thread(lambda: peers.sender.send(peers.meeting().round(), 0, bucket_of(10))), 1 + SLACK_S)

    @pytest.mark.parametrize("end", ["sender", "receiver"])
    def test_a_round_that_is_stopped_ends_all_waits_and_the_ends_can_be_closed(self, end: str) -> None:
        with self.peers() as peers:
            meeting, transfer = peers.meeting(), peers.transfers[0 if end == "sender" else 1]
            if end == "sender":
                call: Future[object] = in_thread(lambda: transfer.send(meeting.round(), 0, bucket_of(10)))
            else:
                call = in_thread(lambda: transfer.receive(meeting.round(), 0, [10]))
            time.sleep(0.2)
            meeting.stop("another end has failed")
            error = outcome(call, SLACK_S)
            assert error is not None or end == "sender", "receive returned what nobody had sent"
            start = time.monotonic()
            peers.close()
            assert time.monotonic() - start < SLACK_S, "close waits for what will never come"

    def test_a_sync_that_is_stopped_midway_leaves_nothing_to_the_next(self) -> None:
        """The peers are closed then, and new ones meet."""
        with self.peers() as peers:
            meeting = peers.meeting()
            sending = in_thread(lambda: peers.sender.send(meeting.round(), 0, bucket_of(40, seed=1)))
            receiving = in_thread(lambda: peers.receivers[0].receive(meeting.round(), 0, [40]))
            peers.wait_for([sending, receiving])
            meeting.stop("another end has failed")
        buckets = [bucket_of(40, seed=2), bucket_of(40, seed=3)]
        with self.peers() as peers:
            assert_received(peers.sync(buckets), buckets)

    def test_an_end_can_be_closed_twice_and_before_it_is_connected(self) -> None:
        with self.peers(connected=False) as peers:
            peers.close()
        with self.peers() as peers:
            peers.close()

    def test_process_wide_state_is_left_as_it_was(self) -> None:
        """Trainer and rollout have worlds of their own in torch.distributed, and libraries that read the environment,
        so that nothing may differ while the peers are connected either."""

        def worlds() -> tuple[bool, int]:
            return dist.is_initialized(), len(dist.distributed_c10d._world.pg_map)

        before, worlds_before = process_state(), worlds()
        with self.peers() as peers:
            peers.sync([bucket_of(10)])
            connected, worlds_connected = process_state(), worlds()
        after = process_state()
        restore(before)
        assert worlds_connected == worlds() == worlds_before, "worlds and groups of torch.distributed"
        assert left_behind(before, connected) == {}, "state of the process while the peers are connected"
        assert left_behind(before, after) == {}, "state of the process that a transfer left behind"
