"""megatron-core's own process groups of every rank, for many layouts. Run as a process of its own: JSON in, JSON out.

torch's fake backend makes real process groups that never talk, so one process plays all ranks, one after another.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

GROUPS: dict[str, Any] = {
    "tp": parallel_state.get_tensor_model_parallel_group,
    "cp": parallel_state.get_context_parallel_group,
    "dp": parallel_state.get_data_parallel_group,
    "dp cp": lambda: parallel_state.get_data_parallel_group(with_context_parallel=True),
    "pp": parallel_state.get_pipeline_model_parallel_group,
    "pp tp": parallel_state.get_model_parallel_group,
    "ep": parallel_state.get_expert_model_parallel_group,
    "etp": parallel_state.get_expert_tensor_parallel_group,
    "edp": parallel_state.get_expert_data_parallel_group,
    "ep etp": parallel_state.get_expert_tensor_and_model_parallel_group,
}


def groups_of(rank: int, world_size: int, sizes: dict[str, Any]) -> dict[str, list[int]] | str:
    """Ranks of each group of a rank, or megatron's error."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
        return {axes: dist.get_process_group_ranks(group()) for axes, group in GROUPS.items()}
    except (AssertionError, RuntimeError) as error:
        return str(error)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


if __name__ == "__main__":
    json.dump(
        [[groups_of(rank, world, sizes) for rank in ranks] for world, ranks, sizes in json.load(sys.stdin)], sys.stdout
    )
