"""Checkpoints of a Megatron engine: which pieces they hold, and how they are written while training goes on.

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
from manymesh_megatron.groups import sizes
from manymesh_megatron.loaded import Loaded
from manymesh_megatron.pieces import Piece, State, state_of
from manymesh_megatron.runtime import Runtime
from manymesh_megatron.storage import Index, Written, write_index, write_pieces


@attrs.frozen(eq=False)
class _Pending:
    """A checkpoint whose files are on their way to the disk."""

    partial: Path
    contents: Contents
    written: Future[Written]


class Checkpoints:
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

    def save(self, loaded: Loaded, path: str, step: int) -> None:
        """Raises Refused: on all ranks, where any cannot write. The engine and what was at `path` are untouched."""
        self.settle()
        rank, contents = self._mesh.rank, self._contents(loaded, step)
        pieces = [each for each in self._state(loaded).pieces if each.written]
        pieces += [self._of_rank(name, each) for name, each in self._rng().items()]
        if rank == 0 and loaded.optimizer is not None:
            pieces.append(_count(loaded.optimizer.num_steps))
        partial = checkpoint_directory.prepare(path, self._group)
        if self._config.async_checkpoint:
            staged = _staged(pieces)
            written = _in_background(lambda: write_pieces(partial, staged, rank))
            self._pending = _Pending(partial, contents, written)
        else:
            self._finish(partial, contents, lambda: write_pieces(partial, pieces, rank))

    def load(self, loaded: Loaded, path: str) -> Contents:
        """Takes host memory for this rank's share of the state, for the time.

        Raises:
            Refused: on all ranks and with nothing changed, where there is no checkpoint of this model, or not all of it
                can be read.
        """
        self.settle()
        have = checkpoint_directory.check(path, self._contents(loaded, 0), self._group)
        state, optimizer = self._state(loaded), loaded.optimizer
        count, rng = _count(0), {name: self._of_rank(name, each) for name, each in self._rng().items()}
        pieces, values = state.pieces + ([count] if optimizer is not None else []), []
        problem: Refused | None = None
        try:
            index = Index(path)
            if not all(each.name in index.tensors for each in rng.values()):
                rng = {}  # of other sizes
            pieces += rng.values()
            # Not in place: if it cannot be read to its end, nothing has changed.
            values = index.read(pieces)
        except Refused as error:
            problem = error
        agree(self._group, problem)
        for piece, value in zip(pieces, values, strict=True):
            piece.tensor.copy_(value)
        for padding in state.padding:
            padding.zero_()
        if rng:
            self._set_rng({name: piece.tensor for name, piece in rng.items()})
        if optimizer is not None:
            optimizer.num_steps, optimizer.schedule_step = int(count.tensor), have.schedule_step
        return have

    def poll(self) -> None:
        """Finish what is pending if all ranks have written; one small all-reduce while something is."""
        if self._pending is None:
            return
        done = torch.tensor(int(self._pending.written.done()), device=self._runtime.device)
        dist.all_reduce(done, op=dist.ReduceOp.MIN, group=self._group)
        if int(done):
            self.settle()

    def settle(self) -> None:
        """Wait for what is pending, and finish it.

        Raises:
            Refused: on all ranks, where any could not write; it is not tried again.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            self._finish(pending.partial, pending.contents, pending.written.result)

    def _finish(self, partial: Path, contents: Contents, job: Callable[[], Written]) -> None:
        written: list[Written] = []
        try:
            checkpoint_directory.write(partial, lambda _: written.append(job()), self._group)
            checkpoint_directory.write(partial, lambda _: write_index(partial, written[0], self._group), self._group)
            checkpoint_directory.finish(partial, contents, self._group)
        except Refused:
            checkpoint_directory.discard(partial, self._group)
            raise

    def _state(self, loaded: Loaded) -> State:
        state, problem = State([], []), None
        try:
            with self._runtime.scope():
                state = state_of(loaded.models, loaded.optimizer, self._model.vocab_size)
        except Refused as error:
            problem = error
        agree(self._group, problem)
        return state

    def _contents(self, loaded: Loaded, step: int) -> Contents:
        return Contents(
            engine="megatron",
            step=step,
            schedule_step=loaded.optimizer.schedule_step if loaded.optimizer else 0,
            model_type=self._model.model_type,
            world_size=self._mesh.layout.world_size,
            parameters={spec.name: list(spec.shape) for spec in loaded.weights.specs()},
            optimizer=loaded.optimizer is not None,
        )

    def _rng(self) -> dict[str, torch.Tensor]:
        """Copies of this rank's random states."""
        states = checkpoint_directory.rng_tensors(self._runtime.device, self._mesh.rank)
        with self._runtime.scope():
            tracked = get_cuda_rng_tracker().get_states()
        states |= {name: each for name, each in tracked.items() if isinstance(each, torch.Tensor)}
        return {name: each.clone() for name, each in states.items()}

    def _set_rng(self, states: dict[str, torch.Tensor]) -> None:
        checkpoint_directory.set_rng(states, self._runtime.device, self._mesh.rank)
        with self._runtime.scope():
            tracker = get_cuda_rng_tracker()
            known = tracker.get_states()
            tracker.set_states(known | {name: each for name, each in states.items() if name in known})

    def _of_rank(self, name: str, tensor: torch.Tensor) -> Piece:
        """A piece under a name that only the same rank of the same layout gives it."""
        layout = "-".join(str(each) for each in (self._mesh.layout.world_size, *sizes(self._config)))
        return _whole(f"{name}.rank{self._mesh.rank}.{layout}", tensor)


def _count(num_steps: int) -> Piece:
    return _whole("optimizer.step", torch.tensor([num_steps]))


def _whole(name: str, tensor: torch.Tensor) -> Piece:
    return Piece(name, (name,), tensor, (0,) * tensor.dim(), tuple(tensor.shape), written=True)


def _staged(pieces: Sequence[Piece]) -> list[Piece]:
    """Copies on the host, made when this returns."""
    made = []
    for piece in pieces:
        on_device = piece.tensor.device.type != "cpu"
        copy = torch.empty_like(piece.tensor, device="cpu", pin_memory=on_device)
        made.append(attrs.evolve(piece, tensor=copy.copy_(piece.tensor, non_blocking=on_device)))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return made


def _in_background(function: Callable[[], Written]) -> Future[Written]:
    """In a thread that the process doesn't wait for when it ends: the checkpoint then never gets its name."""
    future: Future[Written] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="checkpoint", daemon=True).start()
    return future
