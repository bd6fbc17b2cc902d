"""WeightSync: the driver's one verb for weights, from trainers to rollouts wherever these are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Self

import attrs

from core.dispatch import PerRank
from core.errors import ConfigError, DeadlineExceeded, ManymeshError, Refused, TransferFailed
from core.group import WorkerGroup
from core.registry import Choice, EngineRegistry
from manymesh.workers.transfer.channel import Channel
from manymesh.workers.transfer.connection import Connection
from manymesh.workers.transfer.endpoint import Receipt


@attrs.frozen
class TransferConfig:
    """How weights cross from the trainer's pool to the rollouts'.

    Attributes:
        kind: name in the registry: "collective", "ipc", "object_store", "disk" or a plugin's.
        options: of the kind, structured into its manifest's class.
        bucket_mb: size of a bucket, MiB. Each end has two at a time. None: 1024 where all ends are on CUDA, else 256.
        timeout_s: deadline of each wait of one end for another, seconds.
    """

    kind: str = "collective"
    options: Mapping[str, Any] = attrs.field(factory=dict)
    bucket_mb: float | None = None
    timeout_s: float = 120.0

    def __attrs_post_init__(self) -> None:
        for name in ("bucket_mb", "timeout_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
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
    """Weights from a group of trainers to rollouts: in the trainers' own processes, in other groups, or both.

    In their own processes the trainers hand their weights over (ActorRolloutRefWorker.update_weights), and `kind` is
    not used. To other groups rank 0 of the trainers, which holds full tensors, sends them, and every rank of every
    group gets all of them: either all have the new version after a sync, or it raises and none has.

    Args:
        trainers: workers with an actor (ActorRolloutRefWorker).
        rollouts: one or several groups of workers with a rollout; the trainers' own group may be one of them.
        kind, bucket_mb, options, timeout_s: see TransferConfig.

    Attributes:
        version: of the weights that all rollouts have had from the last sync that went well; None before.
        receipts: of the last sync to other groups, the sender's first.

    Raises:
        RegistryError, ConfigError: as TransferConfig.check.

    Example:
        sync = WeightSync(trainers, rollouts, kind="collective")
        while True:
            sync.sync()
            batch = rollouts.generate_sequences(prompts, sampling)
            ...  # reward
            trainers.update_actor(batch, temperature=1.0)
    """

    def __init__(
        self,
        trainers: WorkerGroup,
        rollouts: WorkerGroup | Sequence[WorkerGroup],
        *,
        kind: str = "collective",
        bucket_mb: float | None = None,
        options: Mapping[str, Any] | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        self.config = TransferConfig(kind, options or {}, bucket_mb, timeout_s)
        groups = [rollouts] if isinstance(rollouts, WorkerGroup) else list(rollouts)
        if not groups:
            raise Refused("weights go to a group with rollouts", have="no group", where=f"trainers {trainers.name!r}")
        self._trainers = trainers
        self._in_process = any(group is trainers for group in groups)
        self._receivers = tuple(group for group in groups if group is not trainers)
        self._choice = self.config.check() if self._receivers else None
        self._connected, self._rounds = False, 0
        self._channel: Channel | None = None
        self.version: int | None = None
        self.receipts: tuple[Receipt, ...] = ()

    def sync(self) -> int:
        """Have all rollouts load the trainers' weights; gives their version.

        From then on a rollout refuses to sample with older weights, unless `min_version` of generate_sequences allows
        it.

        Raises:
            Refused: a rollout's model has other tensors: the error lists matched, missing and unexpected names. Nothing
                has changed. Or the trainers' own processes have no rollout.
            TransferFailed: an end did not send or receive all, or what arrived was not what was sent. No rollout has
                the new version: those that load in place have no valid weights. Mend it and sync again.
            WorkerFailed: a group has failed.
        """
        if self._receivers:
            version = self._send()
        if self._in_process:
            version = self._trainers.update_weights()
        self.version = int(version)
        return self.version

    def connect(self) -> None:
        """Have the ends in several groups meet. `sync` does it where it is not done, and again after one that failed.

        Raises:
            TransferFailed: an end did not come; the groups are healthy.
            Refused: an end cannot use the options, or the kind cannot connect ends where these are.
            WorkerFailed: a group has failed.
        """
        if self._connected or self._choice is None:
            return
        config, trainers = self.config, self._trainers
        hosts = _Hosts([trainers, *self._receivers])
        address = trainers.open_weight_channel(hosts.of(trainers)[0], config.timeout_s)
        # A driver outside of the cluster may not reach it. Then an end that dies is noticed at the others' deadlines.
        with suppress(DeadlineExceeded):
            self._channel = Channel.join(address, min(config.timeout_s, 10.0))
        self._connected = True
        connection = Connection(
            config.kind,
            config.options,
            self._choice,
            address,
            sum(group.world_size for group in self._receivers),
            None if config.bucket_mb is None else max(int(config.bucket_mb * (1 << 20)), 1),
            config.timeout_s,
        )
        indices: list[int | None] = [0, *[None] * (trainers.world_size - 1)]
        calls = [partial(trainers.connect_weights, "source", connection, PerRank(indices), PerRank(hosts.of(trainers)))]
        first = 1
        for group in self._receivers:
            places = PerRank(range(first, first + group.world_size)), PerRank(hosts.of(group))
            calls.append(partial(group.connect_weights, "sink", connection, *places))
            first += group.world_size
        errors = [error for answers in self._all(calls, "connect") for error in answers if error is not None]
        if errors:
            self.close()
            for error in errors:
                if isinstance(error, Refused):
                    error.where = ", ".join(filter(None, (error.where, self._where)))
                    raise error
            raise TransferFailed(
                "the ends of a transfer did not meet", have=str(errors[0]), where=self._where, mend=_AGAIN
            )

    def _send(self) -> int:
        self.connect()
        version, specs = self._trainers.offer_weights()
        groups: list[WorkerGroup] = []
        try:
            for group in self._receivers:
                group.begin_weights(specs, version)
                groups.append(group)
        except ManymeshError:
            for group in groups:
                group.abort_weights()
            raise
        self._rounds += 1
        name = f"sync {self._rounds}"
        calls = [partial(self._trainers.transfer_weights, "source", specs, version, name)]
        calls += [partial(group.transfer_weights, "sink", specs, version, name) for group in self._receivers]
        answers = self._all(calls, name)
        self.receipts = tuple(receipt for answer in answers for receipt in answer if receipt is not None)
        failures = sorted(
            (receipt for receipt in self.receipts if receipt.error), key=lambda receipt: receipt.stopped_by_other
        )
        if failures:
            self.close()
            reason, *more = failures[0].error.splitlines()
            raise TransferFailed(
                f"weights of version {version} did not reach the rollouts: {reason}",
                have="; ".join(line.strip() for line in more),
                where=f"{failures[0].end}, {self._where}",
                mend=_AGAIN,
            )
        return int(version)

    def close(self) -> None:
        """Let go of the link, on the groups that live. Can be called twice; a later sync connects again."""
        if not self._connected:
            return
        self._connected, self._channel = False, None
        for group in (*self._receivers, self._trainers):
            with suppress(ManymeshError):
                group.close_weights("source" if group is self._trainers else "sink")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _where(self) -> str:
        names, first = [], 1
        for group in self._receivers:
            last = first + group.world_size - 1
            names.append(f"{group.name} ({f'receiver {first}' if first == last else f'receivers {first} to {last}'})")
            first = last + 1
        return f"transfer {self.config.kind!r} from rank 0 of group {self._trainers.name!r} to {', '.join(names)}"

    def _all(self, calls: Sequence[Callable[[], Any]], round_name: str) -> list[Any]:
        """Call the groups at the same time, each in a thread. When one raises, the round is stopped for the others,
        so that they return soon, and what it raised is raised."""
        with ThreadPoolExecutor(len(calls)) as pool:
            futures = [pool.submit(call) for call in calls]
            waiting: set[Future[Any]] = set(futures)
            try:
                while waiting:
                    finished, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    for future in finished:
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
