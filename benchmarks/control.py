"""What a call costs the driver itself, by number of ranks: `python -m benchmarks.control`.

The transport keeps no process and runs nothing: it hands each rank's arguments back as its answer. So what is timed is
binding, dealing and joining. The floor of a case is a plain loop over the ranks that does the least the case asks for:
a list of answers, or slices of the columns' tensors and their concatenation.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks._pairs import Case, measure, report
from core.batch import flat, jagged_from, nested
from core.dispatch import Command, Dispatch, RankCall, on_mesh, register
from core.group import RayClassWithInitArgs, WorkerGroup
from core.transport import Answered, Identity
from core.transport.local import Ended
from core.worker import Worker


class Trivial(Worker):
    """Its methods are never run."""

    @register(Dispatch.ONE_TO_ALL)
    def nothing(self) -> None: ...

    @register(on_mesh("m"))
    def echo(self, batch: Any) -> Any: ...


class Mirror:
    """A transport in memory that imports no torch: the first argument of a call is its answer."""

    store = ""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.identities = [Identity("here", "127.0.0.1", 0) for _ in range(world_size)]

    def _all(self, value: Callable[[int], Any]) -> Ended:
        return Ended({rank: Answered(value(rank)) for rank in range(self.world_size)})

    def construct(self, build: RayClassWithInitArgs, observers: tuple[Any, ...]) -> Ended:
        return self._all(lambda rank: None)

    def route(self, mesh: str) -> Ended:
        return self._all(lambda rank: (rank, True))

    def run(self, command: Command, calls: Mapping[int, RankCall], answering: frozenset[int]) -> Ended:
        return Ended({rank: Answered(_on_wire(call.args[0]) if call.args else None) for rank, call in calls.items()})

    def shutdown(self) -> Ended:
        return self._all(lambda rank: None)

    def end(self) -> None: ...

    def log_tail(self, rank: int) -> tuple[str, ...]:
        return ()


def _on_wire(table: Any) -> Any:
    return table.on_wire()


def small(rows: int) -> TensorDict:
    """x, and four jagged columns of four tokens a row."""
    ids: Any = jagged_from(torch.arange(4 * rows), torch.full((rows,), 4))
    offsets = ids.offsets()
    tokens = {f"t{i}": nested(torch.rand(4 * rows), offsets) for i in range(4)}
    return TensorDict({"x": torch.arange(rows), **tokens}, batch_size=[rows])


def cases(world_size: int, pairs: int) -> list[Case]:
    group: Any = WorkerGroup(Mirror(world_size), RayClassWithInitArgs(Trivial))
    batch = small(4 * world_size)
    columns = [batch["x"], *(flat(batch[f"t{i}"])[0] for i in range(4))]

    def sliced() -> list[torch.Tensor]:
        parts = [[column.chunk(world_size)[rank].numpy() for column in columns] for rank in range(world_size)]
        return [torch.cat([torch.from_numpy(part[i]) for part in parts]) for i in range(len(columns))]

    return [
        measure(f"no-op, {world_size} ranks", lambda: [None for _ in range(world_size)], group.nothing, 10 * pairs),
        measure(f"small batch, {world_size} ranks", sliced, lambda: group.echo(batch), 10 * pairs),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the driver's own share of a call.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4, 16, 64])
    args = parser.parse_args()
    torch.set_num_threads(1)
    report([case for ranks in args.ranks for case in cases(ranks, args.pairs)], args.json)


if __name__ == "__main__":
    main()
