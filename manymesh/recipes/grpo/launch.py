"""The workers of a run on Ray: a cluster that exists (RAY_ADDRESS), or one on this machine."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import attrs

from core.errors import Refused
from core.group import RayClassWithInitArgs, WorkerGroup
from manymesh.recipes.grpo.config import GrpoConfig, PoolConfig
from manymesh.recipes.grpo.placement import Placement
from manymesh.recipes.grpo.workers import Workers


@contextmanager
def ray_cluster(*pools: PoolConfig) -> Iterator[None]:
    """A connection to Ray. What was started (with room for the pools) or connected here ends with the block.

    Raises:
        Refused: RAY_ADDRESS is set and nobody answers there.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS")
    # Workers' output stays in Ray's log files: the end of it is in the error of a worker that fails.
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    if address:
        need_cluster(address)
        ray.init(address=address, **quiet)
    else:
        import torch

        cpus = math.ceil(sum(pool.world_size * (pool.cpus_per_process or 1) for pool in pools))
        # Beside GPUs processes get more CPUs than one, out of all that the machine has.
        most = (os.cpu_count() or 1) if torch.cuda.device_count() else 1
        ray.init(num_cpus=max(cpus, most), include_dashboard=False, **quiet)
    try:
        yield
    finally:
        ray.shutdown()


def need_cluster(address: str, timeout_s: float = 5.0) -> None:
    """See that somebody listens at a cluster's address; Ray itself tries for two minutes and then exits.

    Args:
        address: "host:port" or "ray://host:port". Others ("auto") are left to Ray.

    Raises:
        Refused: nobody does.
    """
    host, _, port = address.rpartition("//")[2].rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=timeout_s).close()
    except OSError as error:
        raise Refused(
            f"no Ray cluster answers at {address!r}",
            have=error,
            where="RAY_ADDRESS",
            mend="start it (ray start --head), or unset RAY_ADDRESS to use this machine alone",
        ) from error


@contextmanager
def worker_group(config: GrpoConfig) -> Iterator[Workers]:
    """The run's workers: one group, or with `rollout_pool` two; they are ended with the block, at once where it is
    left by an error.

    Raises:
        Refused: no cluster, or one that is too small.
        WorkerFailed: a worker could not be made.
    """
    from manymesh.workers import ActorRolloutRefWorker, RolloutWorker, WeightSync

    placement = Placement(config)
    with ExitStack() as stack:
        others = [config.rollout_pool] if config.rollout_pool else []
        stack.enter_context(ray_cluster(config.pool, *others))
        worker = RayClassWithInitArgs(ActorRolloutRefWorker, placement.worker())
        trainers = stack.enter_context(_group(worker, placement, "actor", "actor_rollout_ref"))
        if config.rollout_pool is None:
            yield Workers.shared(trainers)
            return
        sampler = RayClassWithInitArgs(RolloutWorker, placement.rollout_worker())
        rollouts = stack.enter_context(_group(sampler, placement, "rollout", "rollout"))
        sync = WeightSync(trainers, [rollouts], **attrs.asdict(config.transfer, recurse=False))
        stack.callback(sync.close)
        yield Workers(trainers, rollouts, sync)


@contextmanager
def _group(worker: RayClassWithInitArgs, placement: Placement, part: str, name: str) -> Iterator[WorkerGroup]:
    """On the pool that holds a part."""
    from core.transport.ray import RayResourcePool, RayWorkerGroup

    pool = placement.pool(part)
    with RayResourcePool(
        pool.processes,
        use_gpu=pool.use_gpu,
        gpus_per_process=placement.gpus_per_process(part),
        cpus_per_process=pool.cpus_per_process,
        name=name,
        placement_timeout_s=pool.placement_timeout_s,
    ) as room:
        env = {"OMP_NUM_THREADS": str(max(1, int(room.cpus_per_process)))}
        env |= nccl_variables(os.environ) if room.num_gpus else {}
        group = RayWorkerGroup(
            room,
            worker,
            name=name,
            env=placement.environment(part) | env | dict(pool.env),
            all_devices_visible=pool.all_devices_visible,
            python=pool.python,
            timeout_s=pool.call_timeout_s,
            start_timeout_s=pool.start_timeout_s,
        )
        try:
            yield group
        except BaseException:
            group.shutdown(timeout_s=0.5, report=False)  # they may be in the midst of a long call
            raise
        group.shutdown(timeout_s=pool.shutdown_timeout_s)


def nccl_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What the driver says NCCL, for the workers of all groups: ranks of one communicator must have the same settings.

    NCCL_CUMEM_ENABLE is 0 where the driver has none, as in every process that imports vLLM.
    """
    from manymesh.workers.transfer.places import shared_nccl_variables

    return {"NCCL_CUMEM_ENABLE": "0"} | shared_nccl_variables(environment)
