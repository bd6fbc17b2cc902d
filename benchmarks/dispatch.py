"""A call of a group against the least that Ray can do: `python -m benchmarks.dispatch`.

| case | ours | floor |
|---|---|---|
| no-op | a method to all ranks that does nothing | the same on bare Ray actors |
| dense 1, 64, 256 MB | a batch of one column, split, given back, joined | numpy: put, copy, return, get, concatenate |
| jagged | 1024 rows, 20 jagged columns (25 MB), 4 object columns | the same, by flat values |
| padded | the same rows, padded (40 MB) | as dense |
| observed no-op | with an observer on the driver and in the workers | ours without |
| shared | two ranks a shard (dp W/2) | ours with a shard for each rank (dp W) |
| future 256 MB | from the workers of one group (dp 4) to another's (dp 2) | references from actor to actor |

`--growth` prints instead what a call costs by number of ranks and of rows. `--peer verl` adds verl's own dispatch of
the same dense and padded columns (its DataProto) against the same floor, where verl is installed.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import ray
import torch
from tensordict import TensorDict

from benchmarks._dispatch_workers import Bare, Echoing, Listening
from benchmarks._pairs import Case, measure, report
from core.batch import flat, is_jagged, jagged_from, object_column, objects, to_padded
from core.group import RayClassWithInitArgs
from core.transport.ray import RayResourcePool, RayWorkerGroup

ROWS = 1024


def dense_batch(num_bytes: int) -> TensorDict:
    return TensorDict({"x": torch.rand(ROWS, num_bytes // 4 // ROWS)}, batch_size=[ROWS])


def rl_batch() -> TensorDict:
    """20 jagged columns that share their offsets, 204 tokens a row on average, half of them int64; 4 object columns."""
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(80, 328, (ROWS,), generator=random)
    tokens = int(lengths.sum())
    first: Any = jagged_from(torch.randint(0, 50_000, (tokens,), generator=random), lengths)
    table: dict[str, Any] = {"c0": first}
    for i in range(1, 20):
        values = torch.randint(0, 2, (tokens,)) if i % 2 == 0 and i < 12 else torch.rand(tokens)
        table[f"c{i}"] = torch.nested.nested_tensor_from_jagged(values, first.offsets())
    table |= {f"o{i}": object_column([{"row": row, "text": f"answer {row}"} for row in range(ROWS)]) for i in range(4)}
    return TensorDict(table, batch_size=[ROWS])


class Floor:
    """Bare actors, and an echo of a batch by them."""

    def __init__(self, world_size: int, num_bytes: int = 0) -> None:
        actor = ray.remote(Bare).options(num_cpus=1)
        self.actors = [actor.remote(num_bytes) for _ in range(world_size)]
        ray.get([actor.nothing.remote() for actor in self.actors])

    def nothing(self) -> None:
        ray.get([actor.nothing.remote() for actor in self.actors])

    def echo(self, batch: TensorDict) -> Callable[[], object]:
        """The batch's columns are taken apart before the clock runs."""
        columns: list[tuple[Any, Any]] = []
        for name in batch.keys():  # noqa: SIM118
            column = batch.get(name)
            if is_jagged(column):
                values, offsets = flat(column)
                columns.append((values.numpy(), offsets.tolist()))
            else:
                columns.append((column.numpy() if isinstance(column, torch.Tensor) else objects(column), None))
        size = len(self.actors)
        edges = [ROWS * i // size for i in range(size + 1)]

        def run() -> object:
            shards = []
            for low, high in pairwise(edges):
                shards.append([c[o[low] : o[high]] if o is not None else c[low:high] for c, o in columns])
            calls = [actor.echo.remote(ray.put(shard)) for actor, shard in zip(self.actors, shards, strict=True)]
            parts = ray.get(calls)
            return [
                np.concatenate(each) if isinstance(each[0], np.ndarray) else [item for part in each for item in part]
                for each in zip(*parts, strict=True)
            ]

        return run

    def end(self) -> None:
        for actor in self.actors:
            ray.kill(actor)


@contextmanager
def ours(world_size: int, num_bytes: int = 0, **options: Any) -> Iterator[Any]:
    with (
        RayResourcePool([world_size], use_gpu=False) as pool,
        RayWorkerGroup(pool, RayClassWithInitArgs(Echoing, num_bytes), **options) as group,
    ):
        yield group


def cases(world_size: int, pairs: int, is_chosen: Callable[[str], bool], peer: str | None) -> Iterator[Case]:
    floor = Floor(world_size)
    payloads: dict[str, Callable[[], TensorDict]] = {
        "dense 1 MB": lambda: dense_batch(1 << 20),
        "dense 64 MB": lambda: dense_batch(64 << 20),
        "dense 256 MB": lambda: dense_batch(256 << 20),
        "jagged": rl_batch,
        "padded": lambda: to_padded(rl_batch()),
    }
    with ours(world_size) as group:
        if is_chosen(name := f"no-op, {world_size} ranks"):
            yield measure(name, floor.nothing, group.nothing, 10 * pairs)
        for payload, make in payloads.items():
            if is_chosen(name := f"{payload}, {world_size} ranks"):
                batch = make()
                yield measure(name, floor.echo(batch), lambda batch=batch: group.echo(batch), pairs)  # type: ignore[misc]
        if is_chosen(name := f"observed no-op, {world_size} ranks"):
            with ours(world_size, observers=[Listening()]) as observed:
                yield measure(name, group.nothing, observed.nothing, 10 * pairs)
        if is_chosen(name := f"shared 64 MB, {world_size} ranks"):
            batch = dense_batch(64 << 20)
            yield measure(name, lambda: group.echo(batch), lambda: group.echo_pairs(batch), pairs)
    if peer == "verl":
        yield from verl_cases(world_size, floor, payloads, pairs, is_chosen)
    floor.end()


def verl_cases(
    world_size: int,
    floor: Floor,
    payloads: dict[str, Callable[[], TensorDict]],
    pairs: int,
    is_chosen: Callable[[str], bool],
) -> Iterator[Case]:
    if importlib.util.find_spec("verl") is None:
        print("verl is not installed here, so there are no numbers of it", file=sys.stderr)
        return
    from benchmarks import _verl_peer

    with _verl_peer.echo(world_size) as echo:
        for payload, make in payloads.items():
            if payload != "jagged" and is_chosen(name := f"verl: {payload}, {world_size} ranks"):
                batch = make()
                yield measure(name, floor.echo(batch), echo(batch), pairs)


def futures(num_bytes: int, pairs: int, is_chosen: Callable[[str], bool]) -> Iterator[Case]:
    if not is_chosen(name := f"future {num_bytes >> 20} MB, dp 4 to dp 2"):
        return
    makers, takers = Floor(4, num_bytes // 4), Floor(2)

    def floor() -> object:
        references = [actor.give.remote() for actor in makers.actors]
        pairs_of = (references[:2], references[2:])
        return ray.get([actor.take.remote(*two) for actor, two in zip(takers.actors, pairs_of, strict=True)])

    with ours(4, num_bytes // 4) as maker, ours(2) as taker:
        yield measure(name, floor, lambda: taker.take(maker.give(ROWS // 4)), pairs)
    makers.end()
    takers.end()


def growth(pairs: int, most: int) -> None:
    """Medians of a call's cost, ms, by ranks and by rows of a small batch: x, 4 jagged columns, one of objects."""

    def small(rows: int) -> TensorDict:
        ids: Any = jagged_from(torch.arange(4 * rows), torch.full((rows,), 4))
        table = {f"t{i}": torch.nested.nested_tensor_from_jagged(torch.rand(4 * rows), ids.offsets()) for i in range(4)}
        names = object_column([str(i) for i in range(rows)])
        return TensorDict({"x": torch.arange(rows), "names": names, **table}, batch_size=[rows])

    def cost(run: Callable[[], object]) -> float:
        times = []
        for _ in range(max(pairs, 5) + 2):
            began = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - began))
        return median(times[2:])

    sizes = [16, 256, 4096, 65_536]
    print(f"{'ranks':>5}  {'no-op':>8}" + "".join(f"  {rows:>7} rows" for rows in sizes))
    for world_size in [size for size in (1, 2, 4, 8, 16) if size <= most]:
        with ours(world_size) as group:
            costs = [cost(group.nothing), *(cost(functools.partial(group.echo, small(rows))) for rows in sizes)]
        print(f"{world_size:5}  {costs[0]:8.2f}" + "".join(f"  {each:12.2f}" for each in costs[1:]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time dispatch and collect against bare Ray and numpy.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--growth", action="store_true", help="cost by ranks and rows instead")
    parser.add_argument("--peer", choices=["verl"], help="add this library's numbers, where it is installed")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ray.init(
        num_cpus=16 if args.growth else 3 * max(args.ranks),
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        object_store_memory=4 << 30,
    )
    if args.growth:
        growth(args.pairs, 16)
        return
    results = [
        case for ranks in args.ranks for case in cases(ranks, args.pairs, lambda name: args.only in name, args.peer)
    ]
    results += futures(256 << 20, args.pairs, lambda name: args.only in name)
    report(results, args.json)


if __name__ == "__main__":
    main()
