"""What both ends of a connected transfer have in common: the receipt of a sync, and how a failure stops it for all."""

from __future__ import annotations

import attrs
import torch

from core.errors import ManymeshError
from core.transfer import WeightTransfer
from manymesh.workers.transfer.channel import Channel, Round, Stopped

DEPTH = 2  # buckets that exist at a time
# A receiver waits this many times as long as the sender, which can say who is late: a receiver just hears nothing more.
PATIENCE = 1.5


@attrs.frozen
class Receipt:
    """What one end says of a sync.

    Attributes:
        end: "sender", or which receiver.
        digest: of all tensors' digests, for the log.
        error: why the end did not commit; "" when it did.
        stopped_by_other: the error is only that another end had stopped.
        seconds: at this end.
        waited: of these, for the link.
    """

    end: str
    version: int
    num_tensors: int = 0
    num_bytes: int = 0
    digest: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    error: str = ""
    stopped_by_other: bool = False


class Endpoint:
    """One end of a connected transfer.

    Args:
        name: for errors: "sender", or which receiver.
        device: where the sender's engine has its weights; where a receiver's pieces go.
    """

    def __init__(
        self,
        channel: Channel,
        transfer: WeightTransfer,
        name: str,
        num_receivers: int,
        bucket_bytes: int,
        device: torch.device,
    ) -> None:
        self._channel, self._transfer, self._device = channel, transfer, device
        self._name, self._num_receivers, self._bucket_bytes = name, num_receivers, bucket_bytes

    def close(self) -> None:
        self._transfer.close()

    def _failed(self, receipt: Receipt, round_: Round, error: Exception) -> Receipt:
        """Stop the round for all; the receipt says why."""
        text = error_text(error)
        try:
            round_.stop(f"{self._name}: {text}")
        except Exception:  # the store is gone, and with it the round
            text = f"{text} (and the sender is gone)"
        return attrs.evolve(receipt, error=text, stopped_by_other=isinstance(error, Stopped))


def error_text(error: BaseException) -> str:
    """One of our own errors as it is written, another with its type."""
    return str(error) if isinstance(error, ManymeshError) else f"{type(error).__name__}: {error}"
