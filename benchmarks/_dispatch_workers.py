"""What benchmarks/dispatch.py puts on ranks: our worker, and the bare actor of the floor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from core.dispatch import on_mesh, register
from core.group import Observer
from core.mesh import MeshLayout, RankMesh
from core.worker import Worker


class Echoing(Worker):
    """Has a mesh "all" with a shard for each rank, and "pairs" where two ranks share one (tp 2)."""

    def __init__(self, num_bytes: int = 0) -> None:
        world = self.world_size
        layouts = {"all": MeshLayout.of(dp=world), "pairs": MeshLayout.of(dp=-(-world // 2), tp=min(world, 2))}
        for name, layout in layouts.items():
            self.add_mesh(name, RankMesh(layout, self.rank, layout.route(("dp",))))
        self.kept = np.zeros(num_bytes // 4, np.float32)

    @register()
    def nothing(self) -> None: ...

    @register(on_mesh("all"))
    def echo(self, batch: Any) -> Any:
        return batch

    @register(on_mesh("pairs"))
    def echo_pairs(self, batch: Any) -> Any:
        return batch

    @register(on_mesh("all"), reads_only=True)
    def count(self, batch: Any) -> Any:
        """Rows of each rank, which keeps nothing of them."""
        return len(batch)

    @register(on_mesh("all"))
    def take(self, batch: Any) -> Any:
        return len(batch)

    @register(on_mesh("all"), blocking=False)
    def give(self, rows: int) -> Any:
        """This many rows from each rank, which it has."""
        import torch
        from tensordict import TensorDict

        return TensorDict({"x": torch.from_numpy(self.kept).view(rows, -1)}, batch_size=[rows])


class Listening(Observer):
    """An observer of everything."""

    def before_dispatch(self, call: Any) -> None: ...

    def after_collect(self, call: Any, answers: Any, seconds: float, error: Any) -> None: ...

    def before_method(self, run: Any) -> None: ...

    def after_method(self, run: Any, outcome: Any, seconds: float) -> None: ...


class Bare:
    """A Ray actor with nothing around it."""

    def __init__(self, num_bytes: int = 0) -> None:
        self.kept = np.zeros(num_bytes // 4, np.float32)

    def nothing(self) -> None: ...

    def echo(self, columns: Sequence[Any]) -> list[Any]:
        return [column.copy() for column in columns]

    def give(self) -> Any:
        return self.kept

    def take(self, *parts: Any) -> int:
        return len(np.concatenate(parts))
