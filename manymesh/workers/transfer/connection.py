"""How the ends of a transfer meet: what they must agree on, and one end's way to its connected transfer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import attrs

from core.device import choose_device
from core.errors import ManymeshError, Refused
from core.registry import Choice, EngineRegistry
from core.transfer import TransferRound, WeightTransfer
from manymesh.workers.transfer.channel import Address, Channel
from manymesh.workers.transfer.endpoint import PATIENCE, error_text

# A broadcast of 256 MiB between GPUs takes milliseconds, and what the ends agree on for each bucket no less.
DEFAULT_BUCKET_MB = {"cpu": 256, "cuda": 1024}


@attrs.frozen
class Connection:
    """What all ends of a transfer must agree on.

    Attributes:
        kind, options: a transfer of the registry, and its config.
        choice: what the driver resolved `kind` to.
        address: of the sender's store.
        bucket_bytes: None for what suits the device that the ends have in common.
    """

    kind: str
    options: Mapping[str, Any]
    choice: Choice
    address: Address
    num_receivers: int
    bucket_bytes: int | None
    timeout_s: float


@attrs.frozen
class Connected:
    """One end that has met the others.

    Attributes:
        device: where pieces lie: "cuda" where all ends have their weights there, else "cpu".
    """

    transfer: WeightTransfer
    device: str
    bucket_bytes: int


def connect(
    connection: Connection, channel: Channel, index: int, host: str, device: str | None
) -> Connected | ManymeshError:
    """Build this end's transfer and meet the other ends.

    Args:
        index: 0 for the sender, receivers count from 1.
        host: this node's address.
        device: type of the device on which this end has its weights; None for what the machine has.

    Returns:
        the error where they did not meet, Refused where the options are wrong. It is not raised, since trainers must
        not die of a receiver that did not come.
    """
    round_ = channel.round("connect", PATIENCE if index else 1.0)
    transfer: WeightTransfer | None = None
    try:
        common = _common_device(round_, index, connection.num_receivers, choose_device(device).type)
        transfer = EngineRegistry.new(
            None, connection.kind, connection.options, common, kind="transfer", expect=connection.choice
        )
        assert transfer is not None
        transfer.connect(round_, index, connection.num_receivers, host)
    except Exception as error:
        with suppress(Exception):
            round_.stop(error_text(error))
        if transfer is not None:
            transfer.close()
        return error if isinstance(error, Refused) else ManymeshError(error_text(error))
    return Connected(transfer, common, connection.bucket_bytes or DEFAULT_BUCKET_MB[common] << 20)


def _common_device(round_: TransferRound, index: int, num_receivers: int, device: str) -> str:
    """The type of device that all ends have, else "cpu". The sender decides, so it can say who did not come."""
    round_.put(f"device.{index}", device)
    if index:
        return round_.get("device", "the sender to meet all receivers").decode()
    devices = {device}
    for each in range(1, num_receivers + 1):
        devices.add(round_.get(f"device.{each}", f"receiver {each} of {num_receivers} to connect").decode())
    common = device if len(devices) == 1 else "cpu"
    round_.put("device", common)
    return common
