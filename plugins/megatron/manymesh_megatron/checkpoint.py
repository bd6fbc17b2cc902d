"""Checkpoints of a Megatron engine: which shards they hold, and how they are written while training goes on.

A checkpoint is read at any sizes of tp, pp, virtual stages, cp, dp, ep and etp, with or without the distributed
optimizer. Random states are only of use at the same sizes, and are left alone at others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Thread

import attrs
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from core.errors import Refused
from core.manifest import ModelFacts
from core.mesh import RankMesh
from manymesh.parts import checkpoint_directory
from manymesh.parts.agreement import agree
from manymesh.parts.checkpoint_directory import Contents
from manymesh_megatron.config import MegatronConfig
from manymesh_megatron.engine_state import MegatronState
from manymesh_megatron.groups import sizes
from manymesh_megatron.runtime import Runtime
from manymesh_megatron.storage import Index, WriteResult, write_index, write_shards
from manymesh_megatron.tensor_shards import RankTensors, TensorShard, rank_tensors


@attrs.frozen(eq=False)
class _Pending:
    """A checkpoint whose files are on their way to the disk."""

    partial: Path
    contents: Contents
    result: Future[WriteResult]


class Checkpointer:
    """Of one engine. All methods are collective; parameters and optimizer state are on the device.

    Args:
        config: with async_checkpoint, `save` returns once the state is copied to the host. The files are written by a
            thread, and the checkpoint gets its name at the next `save`, `load` or `settle`, or at a `poll` that finds
            all ranks done. What went wrong is Refused there.
    """

    def __init__(self, config: MegatronConfig, model: ModelFacts, runtime: Runtime, mesh: RankMesh) -> None:
        self._config, self._model, self._runtime, self._mesh = config, model, runtime, mesh
        self._group = dist.group.WORLD
        self._pending: _Pending | None = None

    def save(self, state: MegatronState, path: str, step: int) -> None:
        """Raises Refused: on all ranks, where any cannot write. The engine and what was at `path` are untouched."""
        self.settle()
        rank, contents = self._mesh.rank, self._contents(state, step)
        shards = [each for each in self._tensors(state).shards if each.is_writer]
        shards += [self._of_rank(name, each) for name, each in self._rng().items()]
        if rank == 0 and state.optimizer is not None:
            shards.append(_count(state.optimizer.num_steps))
        partial = checkpoint_directory.prepare(path, self._group)
        if self._config.async_checkpoint:
            copies = _copy_to_host(shards)
            result = _in_background(lambda: write_shards(partial, copies, rank))
            self._pending = _Pending(partial, contents, result)
        else:
            self._finish(partial, contents, lambda: write_shards(partial, shards, rank))

    def load(self, state: MegatronState, path: str) -> Contents:
        """Takes host memory for this rank's share of the state, for the time.

        Raises:
            Refused: on all ranks and with nothing changed, where there is no checkpoint of this model, or not all of it
                can be read.
        """
        self.settle()
        have = checkpoint_directory.check(path, self._contents(state, 0), self._group)
        tensors, optimizer = self._tensors(state), state.optimizer
        count, rng = _count(0), {name: self._of_rank(name, each) for name, each in self._rng().items()}
        shards, values = tensors.shards + ([count] if optimizer is not None else []), []
        problem: Refused | None = None
        try:
            index = Index(path)
            if not all(each.name in index.tensors for each in rng.values()):
                rng = {}  # of other sizes
            shards += rng.values()
            # Not in place: if it cannot be read to its end, nothing has changed.
            values = index.read(shards)
        except Refused as error:
            problem = error
        agree(self._group, problem)
        for shard, value in zip(shards, values, strict=True):
            shard.tensor.copy_(value)
        for padding in tensors.padding:
            padding.zero_()
        if rng:
            self._set_rng({name: shard.tensor for name, shard in rng.items()})
        if optimizer is not None:
            optimizer.num_steps, optimizer.schedule_step = int(count.tensor), have.schedule_step
        return have

    def poll(self) -> None:
        """Finish what is pending if all ranks have written; one small all-reduce while something is."""
        if self._pending is None:
            return
        is_written = torch.tensor(int(self._pending.result.done()), device=self._runtime.device)
        dist.all_reduce(is_written, op=dist.ReduceOp.MIN, group=self._group)
        if int(is_written):
            self.settle()

    def settle(self) -> None:
        """Wait for what is pending, and finish it.

        Raises:
            Refused: on all ranks, where any could not write; it is not tried again.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            self._finish(pending.partial, pending.contents, pending.result.result)

    def _finish(self, partial: Path, contents: Contents, job: Callable[[], WriteResult]) -> None:
        results: list[WriteResult] = []
        try:
            checkpoint_directory.write(partial, lambda _: results.append(job()), self._group)
            checkpoint_directory.write(partial, lambda _: write_index(partial, results[0], self._group), self._group)
            checkpoint_directory.finish(partial, contents, self._group)
        except Refused:
            checkpoint_directory.discard(partial, self._group)
            raise

    def _tensors(self, state: MegatronState) -> RankTensors:
        tensors, problem = RankTensors([], []), None
        try:
            with self._runtime.scope():
                tensors = rank_tensors(state.models, state.optimizer, self._model.vocab_size)
        except Refused as error:
            problem = error
        agree(self._group, problem)
        return tensors

    def _contents(self, state: MegatronState, step: int) -> Contents:
        return Contents(
            engine="megatron",
            step=step,
            schedule_step=state.optimizer.schedule_step if state.optimizer else 0,
            model_type=self._model.model_type,
            world_size=self._mesh.layout.world_size,
            parameters={spec.name: list(spec.shape) for spec in state.weights.specs()},
            optimizer=state.optimizer is not None,
        )

    def _rng(self) -> dict[str, torch.Tensor]:
        """Copies of this rank's random states."""
        states = checkpoint_directory.rng_tensors(self._runtime.device, self._mesh.rank)
        with self._runtime.scope():
            trackers = get_cuda_rng_tracker().get_states()
        states |= {name: each for name, each in trackers.items() if isinstance(each, torch.Tensor)}
        return {name: each.clone() for name, each in states.items()}

    def _set_rng(self, states: dict[str, torch.Tensor]) -> None:
        checkpoint_directory.set_rng(states, self._runtime.device, self._mesh.rank)
        with self._runtime.scope():
            tracker = get_cuda_rng_tracker()
            previous = tracker.get_states()
            tracker.set_states(previous | {name: each for name, each in states.items() if name in previous})

    def _of_rank(self, name: str, tensor: torch.Tensor) -> TensorShard:
        """A shard under a name that only the same rank of the same layout gives it."""
        layout = "-".join(str(each) for each in (self._mesh.layout.world_size, *sizes(self._config)))
        return _whole(f"{name}.rank{self._mesh.rank}.{layout}", tensor)


def _count(num_steps: int) -> TensorShard:
    return _whole("optimizer.step", torch.tensor([num_steps]))


def _whole(name: str, tensor: torch.Tensor) -> TensorShard:
    return TensorShard(name, (name,), tensor, (0,) * tensor.dim(), tuple(tensor.shape), is_writer=True)


def _copy_to_host(shards: Sequence[TensorShard]) -> list[TensorShard]:
    """Copies on the host, made when this returns."""
    copies = []
    for shard in shards:
        on_device = shard.tensor.device.type != "cpu"
        copy = torch.empty_like(shard.tensor, device="cpu", pin_memory=on_device)
        copies.append(attrs.evolve(shard, tensor=copy.copy_(shard.tensor, non_blocking=on_device)))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return copies


def _in_background(function: Callable[[], WriteResult]) -> Future[WriteResult]:
    """In a thread that the process doesn't wait for when it ends: the checkpoint then never gets its name."""
    future: Future[WriteResult] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="checkpoint", daemon=True).start()
    return future
