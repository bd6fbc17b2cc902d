"""Small workers that tests put on groups. A module of its own, so that Ray's processes can import it by name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

from core.dispatch import Dispatch, Execute, WeightedMean, on_mesh, register
from core.errors import Refused
from core.mesh import MeshLayout, RankMesh, Route
from core.worker import Worker, WorkerContext


def mesh_of(rank: int, dp_ranks: Sequence[int], collected: Sequence[int]) -> RankMesh:
    return RankMesh(MeshLayout.of(rank=len(dp_ranks)), rank, Route(tuple(dp_ranks), frozenset(collected)))


class Echo(Worker):
    """Has one mesh "m" with the route it is given, and methods that show what reached it."""

    def __init__(self, dp_ranks: Sequence[int] = (0,), collected: Sequence[int] = (0,)) -> None:
        self.add_mesh("m", mesh_of(self.rank, dp_ranks, collected))
        self.calls = 0

    @property
    def explosive(self) -> Any:
        raise RuntimeError("a property that raises")

    @register(on_mesh("m"))
    def echo(self, batch: Any, other: Any = None) -> Any:
        """Give the batch back."""
        self.calls += 1
        return batch

    @register(on_mesh("m"))
    def second(self, batch: Any, other: Any) -> Any:
        return other

    @register(on_mesh("m"))
    def edit(self, batch: Any) -> Any:
        """Add the rank, double x in place, drop y."""
        batch["rank"] = batch["x"].new_full((len(batch),), self.rank)
        batch["x"].mul_(2)
        return batch.exclude("y")

    @register(on_mesh("m"), rows_per_input="times")
    def repeat(self, batch: Any, times: int) -> Any:
        import torch

        from core.batch import select

        return select(batch, torch.arange(len(batch)).repeat_interleave(times))

    @register(on_mesh("m"), blocking=False, uneven="ragged", num_blocks="num_blocks", rows_per_input="times")
    def make_later(self, batch: Any, num_blocks: int = 1, times: int = 1, width: int = 4) -> Any:
        """(the rows, `times` each, with a wide column of x; a metric; the rank)."""
        import torch

        from core.batch import select
        from core.loss import Metric

        rows = select(batch, torch.arange(len(batch)).repeat_interleave(times))
        rows["wide"] = rows["x"].float()[:, None].expand(-1, width).contiguous()
        rows["pid"] = rows["x"] * 0 + os.getpid()
        return rows, {"sum": Metric(float(rows["x"].sum()), how="sum")}, self.rank

    @register(on_mesh("m"), columns=("x",))
    def only_x(self, batch: Any) -> Any:
        return batch

    @register(on_mesh("m"), blocking=False)
    def hold(self, batch: Any, seconds: float) -> int:
        time.sleep(seconds)
        return len(batch)

    @register(on_mesh("m"), blocking=False, uneven="pad")
    def padded_later(self, batch: Any) -> Any:
        return self._dealt(batch)

    @register()
    def whole(self, batch: Any) -> Any:
        return batch["x"].tolist()

    @register(on_mesh("m"), num_blocks="num_blocks")
    def in_blocks(self, batch: Any, num_blocks: int) -> Any:
        """Row numbers by which block they came in."""
        assert self.shard is not None
        run = len(batch) // num_blocks
        batch["block"] = batch["x"].new_tensor([i // run for i in range(len(batch))])
        batch["row"] = batch["x"].new_tensor(self.shard.row_numbers())
        return batch

    @register(on_mesh("m"), uneven="pad", num_blocks="num_blocks")
    def padded(self, batch: Any, num_blocks: int = 1) -> Any:
        """Row numbers, and how many rows this rank got."""
        return self._dealt(batch)

    @register(on_mesh("m"), uneven="ragged", num_blocks="num_blocks")
    def ragged(self, batch: Any, num_blocks: int = 1) -> Any:
        return self._dealt(batch)

    def _dealt(self, batch: Any) -> Any:
        assert self.shard is not None
        assert len(self.shard.row_numbers()) == len(batch)
        batch["row"] = batch["x"].new_tensor(self.shard.row_numbers())
        batch["got"] = batch["x"] * 0 + len(batch)
        batch["steps"] = batch["x"] * 0 + len(self.shard.sizes)
        return batch

    @register(on_mesh("m"), uneven="pad")
    def mean_of_x(self, batch: Any) -> Any:
        from core.loss import Metric

        weight = batch.get("row_weight", None)
        weight = batch["x"] * 0.0 + 1 if weight is None else weight
        return {"mean": Metric(float((batch["x"] * weight).sum()), float(weight.sum()))}

    @register(on_mesh("m"), reducers={"loss": WeightedMean("n"), "n": "sum", "name": "same", "tags": "concat"})
    def reduced(self, batch: Any) -> Any:
        low = float(batch["x"][0]) == 0
        numbers = {"loss": 1.0, "n": 2} if low else {"loss": 3.0, "n": 6}
        return {**numbers, "name": "a", "tags": [self.rank], "own": self.rank}

    @register(Dispatch.ALL_TO_ALL)
    def each(self, value: Any, *more: Any, **keywords: Any) -> Any:
        return self.rank, value, more, keywords

    @register(Dispatch.DP_COMPUTE)
    def compute(self, value: Any, other: Any = None) -> Any:
        return self.rank, value, other

    @register(Dispatch.DP_COMPUTE_PROTO)
    def over_world(self, batch: Any) -> Any:
        batch["rank"] = batch["x"] * 0 + self.rank
        return batch

    @register(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def with_function(self, function: Any, batch: Any) -> Any:
        return function(batch)

    @register(Dispatch.DP_COMPUTE_METRIC, reducers={"loss": "sum"})
    def metric(self, batch: Any) -> Any:
        return {"loss": self.rank, "rows": batch}

    @register(Dispatch.DIRECT_ROLLOUT_METHOD)
    def direct(self) -> None: ...

    @register(on_mesh("m"))
    def drop_last_row(self, batch: Any) -> Any:
        from core.batch import take

        return take(batch, [(0, len(batch) - 1)])

    @register(on_mesh("m"))
    def unsendable(self, batch: Any, kind: str) -> Any:
        import threading

        self.calls += 1
        return {"sparse": batch["y"].to_sparse(), "lock": threading.Lock()}[kind]

    @register(Dispatch.ALL_TO_ALL)
    def divided(self, value: Any) -> Any:
        return value / 2

    @register(on_mesh("m"))
    def answer(self, batch: Any, kind: str) -> Any:
        from core.loss import Metric

        if kind == "some_none":
            return None if self.rank == 0 else batch
        return {
            "none": None,
            "number": self.rank,
            "metric": {"loss": Metric(float(self.rank), 2.0), "peak": Metric(self.rank, how="max")},
            "pair": (batch, {"rank": self.rank}),
        }[kind]

    @register(on_mesh("m"), blocking=False)
    def later(self, batch: Any) -> Any:
        return batch

    @register(Dispatch.ONE_TO_ALL)
    def see(self, value: Any, *more: Any, **keywords: Any) -> Any:
        """What arrived, and where."""
        return self.rank, value, more, keywords

    @register(Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def see_on_zero(self, value: Any) -> Any:
        self.calls += 1
        return self.rank, value

    @register(Dispatch.RANK_ZERO)
    def zero(self, value: Any) -> Any:
        self.calls += 1
        return self.rank, value

    @register()
    def num_calls(self) -> int:
        return self.calls

    @register()
    def place(self) -> dict[str, Any]:
        names = [*WorkerContext().environment(), "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "NCCL_DEBUG"]
        given = self.context.accelerators
        return {name: os.environ.get(name) for name in names} | {
            "pid": os.getpid(),
            "ids": given and given.ids,
            "ordinals": given and given.ordinals,
        }

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    @register(Dispatch.ONE_TO_ALL, timeout_s=1.0)
    def too_slow(self, rank: int) -> None:
        time.sleep(30 if self.rank == rank else 0)

    @register()
    def refuse(self, ranks: Sequence[int]) -> int:
        if self.rank in ranks:
            raise Refused("this was a bad request", have=1, want=2)
        return self.rank

    @register(blocking=False)
    def fail_later(self, rank: int) -> None:
        """As fail, for a driver that doesn't wait."""
        self.fail(rank)

    @register()
    def fail_behind_another_error(self, rank: int) -> None:
        """One rank's process is killed; the others make an error of their own of what the collective says."""
        self.init_process_group()
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(1))
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.all_reduce(torch.ones(1))
        except Exception as error:
            raise RuntimeError("the step failed") from error

    @register()
    def raise_own_class(self) -> None:
        namespace: dict[str, Any] = {}
        exec("class OnlyHere(Exception): pass", namespace)
        module = type(os)("only_in_the_worker")
        vars(module)["OnlyHere"] = namespace["OnlyHere"]
        namespace["OnlyHere"].__module__ = module.__name__
        import sys

        sys.modules[module.__name__] = module
        raise namespace["OnlyHere"]("out of KV blocks")

    @register()
    def refuse_with_a_lock(self) -> None:
        import threading

        raise Refused("a bad request", have=threading.Lock())

    @register()
    def write_to(self, array: Any) -> Any:
        array[0] = 9
        return array

    @register(on_mesh("m"))
    def batches_in_a_list(self, batch: Any) -> Any:
        return {"both": [batch, batch]}

    @register()
    def fail(self, rank: int) -> None:
        """One rank raises while the others wait in a collective."""
        self.init_process_group()
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(1))
        if self.rank == rank:
            raise ZeroDivisionError("the one at fault")
        dist.all_reduce(torch.ones(1))

    @register(on_mesh("m"))
    def be_killed(self, batch: Any, rank: int) -> Any:
        """One rank's process is killed while the others wait in a collective."""
        self.init_process_group()
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(1))
        if self.rank == rank:
            print("last words of the rank that is killed", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))
        return batch

    @register()
    def sum_ranks(self) -> int:
        self.init_process_group()
        import torch
        import torch.distributed as dist

        total = torch.tensor(self.rank)
        dist.all_reduce(total)
        return int(total)


class Inheriting(Echo):
    """Overrides registered methods without the decorator."""

    def echo(self, batch: Any, other: Any = None) -> Any:
        batch["inherited"] = batch["x"] * 0 + 1
        return batch

    zero = None  # type: ignore[assignment]  # overridden by something that is no method


class Clashing(Worker):
    @register()
    def world_size(self) -> int:  # type: ignore[override]
        return 1


class FailsToStart(Worker):
    def __init__(self, how: str) -> None:
        if how == "refuse":
            raise Refused("a bad constructor argument", have=how)
        if self.rank == self.world_size - 1:
            raise OSError("no such accelerator")


class Nested(Worker):
    """Holds two inner workers whose meshes have the same name."""

    def __init__(self, doubled: bool = False) -> None:
        train, ref = Echo([0, 1, 2, 3], [0, 1, 2, 3]), Echo([0, 0, 1, 1], [1, 3])
        self.export_mesh("train", train, "m")
        self.export_mesh("train" if doubled else "ref", ref, "m")

    @register(on_mesh("train"))
    def on_train(self, batch: Any) -> Any:
        batch["num"] = batch["x"] * 0 + len(batch)
        return batch

    @register(on_mesh("ref"))
    def on_ref(self, batch: Any) -> Any:
        batch["num"] = batch["x"] * 0 + len(batch)
        return batch
