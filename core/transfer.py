"""The contract of weight transfers: how buckets of bytes travel from a trainer to rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


class TransferRound(Protocol):
    """How the ends of a transfer reach each other during one sync, or while they connect.

    Every wait has a deadline, and all waits end when one end stops the round. Keys belong to the round: another round
    may use the same keys.
    """

    @property
    def timeout_s(self) -> float:
        """Deadline of each wait."""
        ...

    @property
    def store(self) -> dist.Store:
        """For the constructor of a process group: torch's own store, with keys of this round alone. A stop does not
        end its waits, so `meet` first."""
        ...

    def put(self, key: str, value: str | bytes = b"1") -> None: ...
    def get(self, key: str, what: str) -> bytes:
        """Wait for what an end puts under the key; `what` is for the error at the deadline."""
        ...

    def meet(self, key: str, num_ends: int, what: str) -> None:
        """Return once so many ends have called this with the key; `what` is for the error at the deadline."""
        ...

    def wait_until(self, condition: Callable[[], bool], what: str, pause: Callable[[float], None] = ...) -> None:
        """Poll `condition`; between polls `pause` waits for the seconds it is given, or less."""
        ...


class WeightTransfer(Protocol):
    """A kind of link that carries buckets of bytes from one rank of a trainer to all ranks of the rollouts.

    It knows nothing of tensors' names, of versions or of digests: its caller cuts and joins, verifies and commits, the
    same way for every kind. `send` and `receive` run in a thread of their own and may block; they raise what goes
    wrong, and wait by means of the round. A connected transfer serves many syncs; each is a round of its own. A factory
    gets `device`, "cpu" or "cuda": where pieces lie that are sent, and where received ones should.
    """

    def connect(self, round_: TransferRound, index: int, num_receivers: int, host: str) -> None:
        """Meet the other ends. `index` 0 is the sender, receivers count from 1; `host` is this node's address."""
        ...

    def send(self, round_: TransferRound, number: int, pieces: Sequence[torch.Tensor]) -> None:
        """Send bucket `number` (from 0) of a sync: flat uint8 tensors, none without elements, which are not touched
        after the return. At most two buckets are sent and not freed. A bucket without bytes is not sent, so that
        numbers may be left out."""
        ...

    def receive(self, round_: TransferRound, number: int, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
        """The pieces of a bucket, of these numbers of bytes, none of them 0. They stay as they are until bucket
        number + 2 is asked for."""
        ...

    def free(self, number: int) -> None:
        """At the sender: all receivers have loaded the bucket."""
        ...

    def close(self) -> None:
        """Free everything, also during a sync that was stopped. Can be called twice."""
        ...
