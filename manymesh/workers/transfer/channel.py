"""What the ends of a transfer tell each other beside the weights: a key-value store that the sender serves.

It carries short strings and digests, no pickles. Every wait has a deadline, and ends early when
one end stops the round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from core.device import connect_store, open_listener
from core.errors import DeadlineExceeded, ManymeshError

Address = tuple[str, int]
COMMIT = "commit"
_FIRST_POLL_S, _LAST_POLL_S = 0.0002, 0.02
_LOOK_S = 0.05  # how often somebody who waits looks whether the round was stopped


class Stopped(ManymeshError):
    """Somebody has stopped the round; the message is theirs."""


class Channel:
    """One process's connection to the store.

    Args:
        timeout_s: deadline of each wait for another process.
    """

    def __init__(self, store: Any, address: Address, timeout_s: float) -> None:
        self.store, self.address, self.timeout_s = store, address, timeout_s

    @classmethod
    def serve(cls, host: str, timeout_s: float) -> Channel:
        """Open the store on an address of this machine, at a port of the system's choice."""
        listener = open_listener(host)
        address = (host, int(listener.getsockname()[1]))
        return cls(connect_store(*address, listener=listener, timeout_s=timeout_s), address, timeout_s)

    @classmethod
    def join(cls, address: Address, timeout_s: float) -> Channel:
        """Connect to a store. Raises DeadlineExceeded when nobody answers."""
        try:
            return cls(connect_store(*address, timeout_s=timeout_s), address, timeout_s)
        except Exception as error:
            raise DeadlineExceeded(
                "the sender of the weights does not answer",
                have=f"{type(error).__name__}: {str(error).splitlines()[0]}",
                where=f"{address[0]}:{address[1]}",
                mend="see whether the sending group runs, and whether this node can reach that address",
            ) from error

    def round(self, name: str, patience: float = 1.0) -> Round:
        """The keys of one round.

        Args:
            patience: waits are this many times the channel's deadline: who knows least of a failure waits longest.
        """
        return Round(self, name, patience)


class Round:
    """A TransferRound over the channel's store: the keys of one sync, or of one connect. Its verdict is decided once:
    to commit, or to stop and why."""

    def __init__(self, channel: Channel, name: str, patience: float = 1.0) -> None:
        self._store, self.name, self._timeout_s = channel.store, name, channel.timeout_s * patience
        self._known = {"verdict"}
        self._last_look = 0.0

    @property
    def store(self) -> dist.Store:
        return dist.PrefixStore(f"{self.name}/store", self._store)

    @property
    def timeout_s(self) -> float:
        return self._timeout_s

    def put(self, key: str, value: str | bytes = b"1") -> None:
        self._known.add(key)
        self._store.set(self._key(key), value)

    def get(self, key: str, what: str) -> bytes:
        """Wait for a key's value.

        Raises:
            Stopped: the round was stopped. What was there before is still given.
            DeadlineExceeded: naming `what` was waited for.
        """
        name = self._key(key)
        self._known.add(key)
        self.wait_until(lambda: bool(self._store.check([name])), what)
        return bytes(self._store.get(name))

    def count_in(self, key: str, of: int) -> bool:
        """Be counted; true for the last of `of` ends."""
        last = self.add(key, 1) == of
        if last:
            self.put(f"{key}.all")
        return last

    def all_counted(self, key: str, what: str) -> None:
        """Wait until all have been counted in."""
        self._known.add(key)
        self.get(f"{key}.all", what)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which begins at 0; gives the sum. One operation of the store."""
        self._known.add(key)
        return int(self._store.add(self._key(key), amount))

    def meet(self, key: str, num_ends: int, what: str) -> None:
        """Return once so many ends have called this with the key. Raises as `get`."""
        self.count_in(key, num_ends)
        self.all_counted(key, what)

    def now(self, key: str) -> bytes | None:
        """A key's value, if there is one."""
        self._known.add(key)
        name = self._key(key)
        return bytes(self._store.get(name)) if self._store.check([name]) else None

    def decide(self, verdict: str) -> str:
        """Give this verdict if there is none yet; gives the one that counts."""
        return bytes(self._store.compare_set(self._key("verdict"), "", verdict)).decode()

    def stop(self, why: str) -> str:
        """The verdict that counts: this one, or an earlier one."""
        return self.decide(f"stop {why}")

    def verdict(self, what: str) -> None:
        """Wait for the verdict to commit. At the deadline the round is stopped, so that nobody commits alone.

        Raises:
            Stopped: it is another one.
        """
        try:
            verdict = self.get("verdict", what).decode()
        except DeadlineExceeded as error:
            verdict = self.stop(str(error))
        if verdict != COMMIT:
            raise Stopped(verdict.removeprefix("stop "))

    def look(self) -> None:
        """As check, where nobody has looked for a while."""
        if time.monotonic() - self._last_look > _LOOK_S:
            self.check()

    def check(self) -> None:
        """Raises Stopped when the round was stopped."""
        self._last_look = time.monotonic()
        name = self._key("verdict")
        if self._store.check([name]) and (verdict := bytes(self._store.get(name)).decode()) != COMMIT:
            raise Stopped(verdict.removeprefix("stop "))

    def wait_until(self, condition: Callable[[], bool], what: str, pause: Callable[[float], None] = time.sleep) -> None:
        """Poll, ever more slowly: a wait is longer than it must be by a fifth at most, or by 20 ms.

        The store's own blocking wait is of no use: it cannot hear of a stop, and holds the connection for all threads.

        Args:
            pause: waits for so many seconds, or less.
        """
        start = now = time.monotonic()
        step = _FIRST_POLL_S
        while not condition():
            pause(step)
            now = time.monotonic()
            step = min(max(step, (now - start) / 5), _LAST_POLL_S)
            self.look()
            if now - start > self._timeout_s:
                raise DeadlineExceeded(f"waited {self._timeout_s:g} s for {what}")

    def forget(self, others: Iterable[str]) -> None:
        """Delete the keys that this end has used, and those of the others: for the sender, once all are done."""
        for key in self._known.union(others):
            self._store.delete_key(self._key(key))

    def _key(self, key: str) -> str:
        return f"{self.name}/{key}"
