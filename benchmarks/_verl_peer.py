"""verl's dispatch of the same columns, for `benchmarks.dispatch --peer verl`. Imported only where verl is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
from tensordict import TensorDict
from verl import DataProto  # type: ignore[import-not-found]
from verl.single_controller.base import Worker  # type: ignore[import-not-found]
from verl.single_controller.base.decorator import Dispatch, register  # type: ignore[import-not-found]
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup  # type: ignore[import-not-found]

from core.batch import objects


class Echoing(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def echo(self, data: Any) -> Any:
        return data


@contextmanager
def echo(world_size: int) -> Iterator[Callable[[TensorDict], Callable[[], object]]]:
    """Gives a function that makes of a batch of dense and object columns the call to be timed."""
    pool = RayResourcePool(process_on_nodes=[world_size], use_gpu=False, max_colocate_count=1)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(cls=ray.remote(Echoing)), device_name="cpu")

    def of(batch: TensorDict) -> Callable[[], object]:
        import numpy as np
        import torch

        tensors, others = {}, {}
        for name in batch.keys():  # noqa: SIM118
            column = batch.get(name)
            if isinstance(column, torch.Tensor):
                tensors[name] = column
            else:
                others[name] = np.array(objects(column), dtype=object)
        data = DataProto.from_dict(tensors=tensors, non_tensors=others)
        return lambda: group.echo(data)

    try:
        yield of
    finally:
        for worker in group.workers:
            ray.kill(worker)
        for placed in pool.get_placement_groups():
            ray.util.remove_placement_group(placed)
