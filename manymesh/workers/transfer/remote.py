"""What of a worker sends weights, what receives them, and the methods by which a driver's WeightSync calls both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from core.device import choose_device
from core.dispatch import Dispatch, register
from core.engine import Engine, WeightSpec
from core.errors import DeadlineExceeded, ManymeshError, Refused
from core.rollout import Rollout
from core.worker import Worker, WorkerContext
from manymesh.parts.rollout_checks import resume_memory
from manymesh.workers.transfer.channel import Address, Channel
from manymesh.workers.transfer.connection import Connection, connect
from manymesh.workers.transfer.endpoint import Receipt
from manymesh.workers.transfer.receiver import Receiver
from manymesh.workers.transfer.sender import Sender

End = Literal["source", "sink"]


class WeightSource:
    """An engine whose weights are sent to other groups. All ranks of its group export; rank 0 is connected and sends.

    Args:
        version: gives the version of the engine's weights.
        device: type of the engine's device; None for what the machine has.
        place: the worker's.
    """

    def __init__(self, engine: Engine, version: Callable[[], int], device: str | None, place: WorkerContext) -> None:
        self.engine, self.version = engine, version
        self._device, self._place = device, place
        self._channel: Channel | None = None
        self._sender: Sender | None = None

    def open(self, host: str, timeout_s: float) -> Address:
        """Serve the store by which the ends meet, at an address of this node."""
        self.close()
        self._channel = Channel.serve(host, timeout_s)
        return self._channel.address

    def connect(self, connection: Connection, index: int, host: str) -> ManymeshError | None:
        """Meet the receivers; gives the error where that fails."""
        if self._channel is None:
            return _not_connected()
        answer = connect(connection, self._channel, index, host, self._device)
        if isinstance(answer, ManymeshError):
            return answer
        self._sender = Sender(
            self._channel,
            answer.transfer,
            "sender",
            connection.num_receivers,
            answer.bucket_bytes,
            choose_device(self._device),
        )
        return None

    def send(self, specs: Sequence[WeightSpec], version: int, round_name: str) -> Receipt | None:
        """Collective: all ranks export, rank 0 sends and has a receipt. It holds what went wrong on the link."""
        if self._place.rank == 0 and self._sender is None:
            raise _not_connected()
        with self.engine.eval_mode():
            stream = self.engine.export_weights(dst="first")
            if self._sender is not None:
                return self._sender.send(specs, iter(stream), round_name, version)
            for _ in stream:
                pass
        return None

    def close(self) -> None:
        """Let go of the link and the store. Can be called twice."""
        if self._sender is not None:
            self._sender.close()
        self._sender = self._channel = None


class WeightSink:
    """A rollout that is sent weights by another group.

    Attributes:
        offered_version: of the last sync that sent weights, also where it failed; None before the first.
    """

    def __init__(self, rollout: Rollout, device: str | None, place: WorkerContext) -> None:
        self.rollout = rollout
        self.offered_version: int | None = None
        self._device, self._place = device, place
        self._receiver: Receiver | None = None

    def connect(self, connection: Connection, index: int, host: str) -> ManymeshError | None:
        """Meet the sender, as receiver `index` (from 1); gives the error where that fails."""
        self.close()
        try:
            channel = Channel.join(connection.address, connection.timeout_s)
        except DeadlineExceeded as error:
            return error
        answer = connect(connection, channel, index, host, self._device)
        if isinstance(answer, ManymeshError):
            return answer
        num_receivers = connection.num_receivers
        self._receiver = Receiver(
            channel,
            answer.transfer,
            f"receiver {index} of {num_receivers} (group {self._place.group!r}, rank {self._place.rank})",
            num_receivers,
            answer.bucket_bytes,
            choose_device(answer.device),
            index=index,
        )
        return None

    def begin(self, specs: Sequence[WeightSpec], version: int) -> None:
        """Take memory for weights and see that those that will come are the model's.

        Raises:
            Refused: with names matched, missing and unexpected. The rollout has the weights that it had.
        """
        resume_memory(self.rollout, ["weights"])
        self.rollout.begin_weight_update(specs, version)

    def receive(self, specs: Sequence[WeightSpec], version: int, round_name: str) -> Receipt:
        """Load what the sender sends. What went wrong is in the receipt."""
        if self._receiver is None:
            raise _not_connected()
        self.offered_version = version
        receipt = self._receiver.receive(specs, self.rollout, round_name, version)
        if not receipt.error:
            resume_memory(self.rollout, ["kv_cache"])
        return receipt

    def close(self) -> None:
        """Let go of the link. Can be called twice."""
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = None


class WeightWorker(Worker):
    """A worker of whose parts weights are sent or received: a WeightSync calls these methods, a driver calls the sync.

    A subclass sets `weight_source`, `weight_sink` or both once it has built what they are about.
    """

    weight_source: WeightSource | None = None
    weight_sink: WeightSink | None = None

    @register(Dispatch.RANK_ZERO)
    def open_weight_channel(self, host: str, timeout_s: float) -> Address:
        """Of the source: serve the store by which the ends meet, at an address of this node."""
        return self._source().open(host, timeout_s)

    @register(Dispatch.ALL_TO_ALL)
    def connect_weights(self, end: End, connection: Connection, index: int | None, host: str) -> ManymeshError | None:
        """Meet the other ends, which must be called at the same time; gives the error where that fails, Refused where
        the transfer's options are wrong.

        Args:
            index: 0 for the sender, receivers count from 1; None for a rank that takes no part.
        """
        if index is None:
            return None
        return (self._source() if end == "source" else self._sink()).connect(connection, index, host)

    @register(Dispatch.RANK_ZERO)
    def offer_weights(self) -> tuple[int, Sequence[WeightSpec]]:
        """Of the source: the version to send, and the tensors that it consists of."""
        source = self._source()
        return source.version(), source.engine.weight_specs()

    @register()
    def begin_weights(self, specs: Sequence[WeightSpec], version: int) -> None:
        """Of the sink: begin an update. Raises Refused where these are not the model's tensors; nothing has changed."""
        self._sink().begin(specs, version)

    @register()
    def transfer_weights(self, end: End, specs: Sequence[WeightSpec], version: int, round_name: str) -> Receipt | None:
        """Send or receive all tensors; both ends must be called at the same time. What went wrong on the link is in
        the receipt, not raised."""
        if end == "source":
            return self._source().send(specs, version, round_name)
        return self._sink().receive(specs, version, round_name)

    @register()
    def abort_weights(self) -> None:
        """Of the sink: forget an update that was begun."""
        self._sink().rollout.abort_weight_update()

    @register()
    def close_weights(self, end: End) -> None:
        """Let go of the link. Can be called twice."""
        part = self.weight_source if end == "source" else self.weight_sink
        if part is not None:
            part.close()

    def shutdown(self) -> None:
        self.close_weights("source")
        self.close_weights("sink")

    def _source(self) -> WeightSource:
        if self.weight_source is None:
            raise Refused(
                f"{type(self).__name__} has no weights to send",
                mend="call init_model first, on workers whose role has an actor",
            )
        return self.weight_source

    def _sink(self) -> WeightSink:
        if self.weight_sink is None:
            raise Refused(
                f"{type(self).__name__} has no rollout that takes weights",
                mend="call init_model first, on workers that have a rollout",
            )
        return self.weight_sink


def _not_connected() -> Refused:
    return Refused("the worker is not connected to the other end of a transfer", mend="WeightSync.connect() does it")
