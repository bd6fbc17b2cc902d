"""WeightSync: the driver's handle on weights that cross from one group to others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import attrs

from core.dispatch import PerRank
from core.errors import ConfigError, DeadlineExceeded, ManymeshError, Refused, TransferFailed
from core.group import WorkerGroup
from core.registry import Choice, EngineRegistry
from manymesh.workers.transfer.channel import Channel
from manymesh.workers.transfer.ends import Receipt
from manymesh.workers.transfer.link import Link


@attrs.frozen
class TransferConfig:
    """How weights cross from the trainer's pool to the rollouts'.

    Attributes:
        kind: name in the registry: "collective", "object_store", "disk" or a plugin's.
        options: of the kind, structured into its manifest's class.
        bucket_mb: size of a bucket, MiB. Each end has two at a time.
        timeout_s: deadline of each wait of one end for another, seconds.
    """

    kind: str = "collective"
    options: Mapping[str, Any] = attrs.field(factory=dict)
    bucket_mb: float = 256
    timeout_s: float = 120.0

    def __attrs_post_init__(self) -> None:
        for name in ("bucket_mb", "timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"illegal {name}", have=getattr(self, name), want="above 0")

    def check(self) -> Choice:
        """What the kind resolves to in the registry.

        Raises:
            RegistryError: there is no such kind.
            ConfigError: the options are not the kind's.
        """
        backend = EngineRegistry.get(self.kind, kind="transfer")
        backend.config(self.options)
        return backend.choice


class WeightSync:
    """Weights from one group of trainers to one or several groups of rollouts.

    Rank 0 of the senders holds full tensors and sends them; every rank of every receiver gets all of them. Either all
    receivers have the new version after a sync, or it raises and none has.

    Args:
        senders: workers with an actor (ActorRolloutRefWorker).
        receivers: workers with a rollout (RolloutWorker), in pools of their own.
        kind, bucket_mb, options, timeout_s: see TransferConfig.

    Raises:
        RegistryError, ConfigError: as TransferConfig.check.
        Refused: a group sends to itself.

    Example:
        sync = WeightSync(trainers, [rollouts], kind="collective")
        version = sync.sync()
        rollouts.generate_sequences(prompts, sampling, min_version=version)
    """

    def __init__(
        self,
        senders: WorkerGroup,
        receivers: Sequence[WorkerGroup],
        *,
        kind: str = "collective",
        bucket_mb: float = 256,
        options: Mapping[str, Any] | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        self.config = TransferConfig(kind, options or {}, bucket_mb, timeout_s)
        if not receivers or any(group is senders for group in receivers):
            raise Refused(
                "weights go from one group to others",
                have=f"{senders.name!r} to {[group.name for group in receivers]}",
                mend="a worker that holds both actor and rollout has update_weights",
            )
        self._choice = self.config.check()
        self._senders, self._receivers = senders, tuple(receivers)
        self._connected, self._rounds = False, 0
        self._channel: Channel | None = None
        self.version: int | None = None
        self.receipts: tuple[Receipt, ...] = ()

    def connect(self) -> None:
        """Have the ends meet. `sync` does it where it is not done, and again after one that failed.

        Raises:
            TransferFailed: an end did not come; the groups are healthy.
            WorkerFailed: a group has failed.
        """
        if self._connected:
            return
        config, senders = self.config, self._senders
        hosts = _Hosts([senders, *self._receivers])
        devices = {senders.sending_device(), *(group.receiving_device() for group in self._receivers)}
        address = senders.open_channel(hosts.of(senders)[0], config.timeout_s)
        # A driver outside of the cluster may not reach it. Then an end that dies is noticed at the others' deadlines.
        with suppress(DeadlineExceeded):
            self._channel = Channel.join(address, min(config.timeout_s, 10.0))
        self._connected = True
        link = Link(
            config.kind,
            config.options,
            self._choice,
            devices.pop() if len(devices) == 1 else "cpu",
            address,
            sum(group.world_size for group in self._receivers),
            max(int(config.bucket_mb * (1 << 20)), 1),
            config.timeout_s,
        )
        calls: list[Callable[[], Any]] = [lambda: [senders.connect_sender(link, hosts.of(senders)[0])]]
        first = 1
        for group in self._receivers:
            indices = PerRank(range(first, first + group.world_size))
            calls.append(_bound(group.connect_receiver, link, indices, PerRank(hosts.of(group))))
            first += group.world_size
        said = [error for errors in self._all(calls, "connect") for error in errors if error]
        if said:
            self.close()
            raise TransferFailed("the ends of a transfer did not meet", have=said[0], where=self._where, mend=_AGAIN)

    def sync(self) -> int:
        """Have all receivers load the senders' weights; gives their version.

        Raises:
            Refused: the receivers' model has other tensors: the error lists matched, missing and unexpected names.
                Nothing has changed.
            TransferFailed: an end did not send or receive all, or what arrived was not what was sent. No receiver has
                the new version: those that load in place have no valid weights. Mend it and sync again.
            WorkerFailed: a group has failed.
        """
        self.connect()
        version, specs = self._senders.offer_weights()
        begun: list[WorkerGroup] = []
        try:
            for group in self._receivers:
                group.begin_weights(specs, version)
                begun.append(group)
        except ManymeshError:
            for group in begun:
                group.abort_weights()
            raise
        self._rounds += 1
        name = f"sync {self._rounds}"
        calls = [_bound(self._senders.send_weights, specs, version, name)]
        calls += [_bound(group.receive_weights, specs, version, name) for group in self._receivers]
        answers = self._all(calls, name)
        self.receipts = tuple(receipt for answer in answers for receipt in answer if receipt is not None)
        bad = sorted((receipt for receipt in self.receipts if receipt.error), key=lambda receipt: receipt.echo)
        if bad:
            self.close()
            what, *more = bad[0].error.splitlines()
            raise TransferFailed(
                f"weights of version {version} did not reach the receivers: {what}",
                have="; ".join(line.strip() for line in more),
                where=f"{bad[0].end}, {self._where}",
                mend=_AGAIN,
            )
        self._senders.confirm_weights(version)
        self.version = int(version)
        return self.version

    def close(self) -> None:
        """Let go of the link, on the groups that live. Can be called twice; a later sync connects again."""
        if not self._connected:
            return
        self._connected, self._channel = False, None
        for group in (*self._receivers, self._senders):
            with suppress(ManymeshError):
                (group.close_sender if group is self._senders else group.close_receiver)()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _where(self) -> str:
        names = ", ".join(group.name for group in self._receivers)
        return f"transfer {self.config.kind!r} from group {self._senders.name!r} to {names}"

    def _all(self, calls: Sequence[Callable[[], Any]], round_name: str) -> list[Any]:
        """Call the groups at the same time, each in a thread. When one raises, the round is stopped for the others,
        so that they return soon, and what it raised is raised."""
        with ThreadPoolExecutor(len(calls)) as pool:
            futures = [pool.submit(call) for call in calls]
            waiting: set[Future[Any]] = set(futures)
            try:
                while waiting:
                    done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    for future in done:
                        if (error := future.exception()) is not None:
                            raise error
            except BaseException as error:
                with suppress(Exception):  # the store may be gone with the senders
                    if self._channel is not None:
                        self._channel.round(round_name).stop(f"{type(error).__name__}: {error}")
                wait(waiting)
                self.close()
                raise
        return [future.result() for future in futures]


_AGAIN = "mend the cause and sync again: all weights are sent then"


class _Hosts:
    """By which address each rank is reached: loopback where all are on one node."""

    def __init__(self, groups: Sequence[WorkerGroup]) -> None:
        places = [identity for group in groups for identity in group.identities]
        nodes = {place.node_id for place in places if place.node_address != "127.0.0.1"}
        self._alone = len(nodes) <= 1

    def of(self, group: WorkerGroup) -> list[str]:
        return ["127.0.0.1" if self._alone else identity.node_address for identity in group.identities]


def _bound(call: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    return lambda: call(*args)
