"""The methods by which a driver connects groups and has weights cross, for worker classes to inherit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import attrs

from core.device import choose_device
from core.dispatch import Dispatch, register
from core.engine import Engine, WeightSpec
from core.errors import DeadlineExceeded, ManymeshError, Refused
from core.registry import Choice, EngineRegistry
from core.rollout import Rollout
from core.transfer import WeightTransfer
from core.worker import Worker
from manymesh.parts.rollout_checks import resume_memory
from manymesh.workers.transfer.channel import Address, Channel
from manymesh.workers.transfer.ends import Receipt, ReceivingEnd, SendingEnd


@attrs.frozen
class Link:
    """What all ends of a transfer must agree on.

    Attributes:
        kind, options: a transfer of the registry, and its config.
        choice: what the driver resolved `kind` to.
        device: "cuda" where all ends have their weights there, else "cpu".
        address: of the sender's store.
    """

    kind: str
    options: Mapping[str, Any]
    choice: Choice
    device: str
    address: Address
    num_receivers: int
    bucket_bytes: int
    timeout_s: float

    def connected(self, channel: Channel, index: int, host: str) -> tuple[WeightTransfer | None, str]:
        """This end, met with the others; or None and why. Trainers don't die of a receiver that did not come."""
        round_ = channel.round("connect")
        transfer: WeightTransfer | None = None
        try:
            transfer = EngineRegistry.new(
                None, self.kind, self.options, self.device, kind="transfer", expect=self.choice
            )
            assert transfer is not None
            transfer.connect(round_, index, self.num_receivers, host)
        except Exception as error:
            with suppress(Exception):
                round_.stop(f"{type(error).__name__}: {error}")
            if transfer is not None:
                transfer.close()
            if isinstance(error, Refused):
                raise
            return None, str(error) if isinstance(error, ManymeshError) else f"{type(error).__name__}: {error}"
        return transfer, ""


class SendsWeights(Worker):
    """A worker whose rank 0 can send the policy's weights to other groups.

    `confirmed_version` is the last one that all receivers have confirmed.
    """

    weight_version: int
    confirmed_version: int | None = None
    _channel: Channel | None = None
    _sending: SendingEnd | None = None

    def sent_engine(self) -> Engine:
        """The engine whose weights are sent."""
        raise NotImplementedError

    @register(Dispatch.RANK_ZERO)
    def sending_device(self) -> str:
        """Type of the device that weights are exported on."""
        raise NotImplementedError

    @register(Dispatch.RANK_ZERO)
    def open_channel(self, host: str, timeout_s: float) -> Address:
        """Serve the store by which the ends meet, at an address of this node."""
        self._close_sending()
        self._channel = Channel.serve(host, timeout_s)
        return self._channel.address

    @register(Dispatch.RANK_ZERO)
    def connect_sender(self, link: Link, host: str) -> str:
        """Meet the receivers, which must be called at the same time; says what went wrong, "" for nothing.

        Raises:
            Refused: the transfer's options are wrong.
        """
        if self._channel is None:
            raise _not_connected()
        transfer, error = link.connected(self._channel, 0, host)
        if transfer is not None:
            self._sending = SendingEnd(self._channel, transfer, "sender", link.num_receivers, link.bucket_bytes)
        return error

    @register(Dispatch.RANK_ZERO)
    def offer_weights(self) -> tuple[int, Sequence[WeightSpec]]:
        """The version to send, and what it consists of."""
        return self.weight_version, self.sent_engine().weight_specs()

    @register()
    def send_weights(self, specs: Sequence[WeightSpec], version: int, round_name: str) -> Receipt | None:
        """Collective: all ranks export, rank 0 sends. What went wrong on the link is in its receipt, not raised."""
        engine, sending = self.sent_engine(), self._sending
        if self.rank == 0 and sending is None:
            raise _not_connected()
        with engine.eval_mode():
            stream = engine.export_weights(dst="first")
            if sending is not None:
                return sending.send(specs, iter(stream), round_name, version)
            for _ in stream:
                pass
        return None

    @register()
    def confirm_weights(self, version: int) -> None:
        """All receivers have this version."""
        self.confirmed_version = version

    @register(Dispatch.RANK_ZERO)
    def close_sender(self) -> None:
        """Let go of the link and the store. Can be called twice."""
        self._close_sending()

    def _close_sending(self) -> None:
        if self._sending is not None:
            self._sending.close()
        self._sending = self._channel = None


class ReceivesWeights(Worker):
    """A worker whose rollout can be sent weights by another group."""

    rollout: Rollout | None
    _receiving: ReceivingEnd | None = None

    def receiving_rollout(self) -> Rollout:
        raise NotImplementedError

    @register(Dispatch.SAME_ON_ALL)
    def receiving_device(self) -> str:
        """Type of the device that the rollout has its weights on."""
        raise NotImplementedError

    @register(Dispatch.ALL_TO_ALL)
    def connect_receiver(self, link: Link, index: int, host: str) -> str:
        """Meet the sender, as receiver `index` (from 1); says what went wrong, "" for nothing.

        Raises:
            Refused: the transfer's options are wrong.
        """
        self._close_receiving()
        try:
            channel = Channel.join(link.address, link.timeout_s)
        except DeadlineExceeded as error:
            return str(error)
        transfer, said = link.connected(channel, index, host)
        if transfer is not None:
            name = f"receiver {index} of {link.num_receivers} (group {self.context.group!r}, rank {self.rank})"
            self._receiving = ReceivingEnd(
                channel,
                transfer,
                name,
                link.num_receivers,
                link.bucket_bytes,
                index=index,
                device=choose_device(link.device, self.context.local_rank),
            )
        return said

    @register()
    def begin_weights(self, specs: Sequence[WeightSpec], version: int) -> None:
        """Take memory for weights and see that those that will come are the model's.

        Raises:
            Refused: with names matched, missing and unexpected. The rollout has the weights that it had.
        """
        rollout = self.receiving_rollout()
        resume_memory(rollout, ["weights"])
        rollout.begin_weight_update(specs, version)

    @register()
    def receive_weights(self, specs: Sequence[WeightSpec], version: int, round_name: str) -> Receipt:
        """Load the weights that the sender sends. What went wrong is in the receipt, not raised."""
        if self._receiving is None:
            raise _not_connected()
        rollout = self.receiving_rollout()
        receipt = self._receiving.receive(specs, rollout, round_name, version)
        if not receipt.error:
            resume_memory(rollout, ["kv_cache"])
        return receipt

    @register()
    def abort_weights(self) -> None:
        """Forget an update that was begun."""
        self.receiving_rollout().abort_weight_update()

    @register()
    def close_receiver(self) -> None:
        """Let go of the link. Can be called twice."""
        self._close_receiving()

    @register(Dispatch.SAME_ON_ALL)
    def rollout_version(self) -> int | None:
        """The version of the rollout's weights; None where it has no valid ones."""
        return self.receiving_rollout().weight_version

    def _close_receiving(self) -> None:
        if self._receiving is not None:
            self._receiving.close()
        self._receiving = None


def _not_connected() -> Refused:
    return Refused("the worker is not connected to the other end of a transfer", mend="WeightSync.connect() does it")
