"""Faults of an engine's life, its weights and its checkpoints: see engine_faults."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from core.engine import StepInfo
from core.errors import Refused
from tests.sdk.kit.faults import Fault, caught_by

GOES_ON = "test_training_goes_on_from_a_checkpoint_as_if_unbroken"


@caught_by("test_eval_mode_is_without_dropout_and_training_gives_no_outputs")
class TrainsInEval(Fault):
    """leaves train mode on in eval_mode"""

    def eval_mode(self) -> AbstractContextManager[None]:
        try:
            return super().train_mode()  # type: ignore[misc,no-any-return]
        except Refused:
            return super().eval_mode()  # type: ignore[misc,no-any-return]


@caught_by("test_nothing_is_left_of_an_engine_that_was_shut_down")
class LeaksGroup(Fault):
    """leaks a process group"""

    def initialize(self) -> None:
        super().initialize()  # type: ignore[misc]
        self._leaked = torch.distributed.new_group()


@caught_by("test_nothing_is_left_of_an_engine_that_was_shut_down")
class LeavesProcess(Fault):
    """leaves a process behind"""

    def initialize(self) -> None:
        super().initialize()  # type: ignore[misc]
        self._child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


@caught_by("test_an_engine_is_there_between_initialize_and_shutdown")
class StaysAfterShutdown(Fault):
    """goes on after shutdown"""

    def shutdown(self) -> None:
        pass


@caught_by("test_an_engine_that_is_not_trainable_infers_and_refuses_to_train")
class TrainsNothing(Fault):
    """takes optimizer steps without an optimizer and says nothing"""

    def optimizer_step(self) -> StepInfo:
        try:
            return super().optimizer_step()  # type: ignore[misc,no-any-return]
        except Refused:
            return StepInfo(0.0, skipped=True)


@caught_by("test_a_model_directory_that_is_not_whole_is_refused_alike_on_all_ranks")
class RefusesByRank(Fault):
    """refuses with another message on each rank"""

    def initialize(self) -> None:
        try:
            super().initialize()  # type: ignore[misc]
        except Refused as error:
            raise Refused(f"{error} on rank {self.mesh.rank}") from error


def fresh_with_weights(engine: Any) -> None:
    """An engine's optimizer state is lost; weights and schedule are kept."""
    tensors, at = [(name, value.clone()) for name, value in engine.export_weights()], engine._training().schedule_step
    engine.initialize()
    engine.load_weights(iter(tensors))
    engine._training().schedule_step = at


@caught_by("test_training_with_everything_on_cpu_between_phases_is_the_same[world 1-by to()]")
class LosesStateOnCpu(Fault):
    """loses the optimizer's state on the way to the CPU"""

    def to(self, device: str, *, model: bool, optimizer: bool, grad: bool) -> None:
        super().to(device, model=model, optimizer=optimizer, grad=grad)  # type: ignore[misc]
        if device == "device" and optimizer and self._state is not None and not getattr(self, "_busy", False):
            self._busy = True
            fresh_with_weights(self)
            self._busy = False


# ---------------------------------------------------------------------------------------------------------- weights


@caught_by("test_trained_weights_load_into_a_fresh_engine", "test_the_gradient_is_the_sum_of_shares_over_dp_ranks")
class ExportsStale(Fault):
    """exports the weights that it began with"""

    def export_weights(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        if not hasattr(self, "_first"):
            self._first = [(name, each.clone()) for name, each in super().export_weights()]  # type: ignore[misc]
        yield from self._first


@caught_by("test_what_is_exported_is_what_is_saved")
class SwapsNames(Fault):
    """exports q as k, and gate as up"""

    def export_weights(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        swap = {"q_proj": "k_proj", "k_proj": "q_proj", "gate_proj": "up_proj", "up_proj": "gate_proj"}
        tensors = dict(super().export_weights(*args, **kwargs))  # type: ignore[misc]
        for name in tensors:
            part = next((each for each in swap if f".{each}." in name), None)
            yield name, tensors[name.replace(part, swap[part]) if part else name]


@caught_by("test_only_the_first_rank_is_given_tensors_where_asked[world 2]")
class ExportsToAll(Fault):
    """exports to all ranks where the first alone was asked for"""

    def export_weights(self, dst: Any = "all") -> Iterator[tuple[str, torch.Tensor]]:
        return super().export_weights("all")  # type: ignore[misc,no-any-return]


@caught_by("test_exported_tensors_are_the_receivers_own")
class ExportsOwn(Fault):
    """exports tensors that its next step changes"""

    def export_weights(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        self._given = {name: each.clone() for name, each in super().export_weights()}  # type: ignore[misc]
        yield from self._given.items()

    def optimizer_step(self) -> StepInfo:
        info: StepInfo = super().optimizer_step()  # type: ignore[misc]
        for each in getattr(self, "_given", {}).values():
            each.add_(1)
        return info


@caught_by("test_streams_of_other_weights_are_refused_and_the_engine_stays_usable")
class PassesOverUnknown(Fault):
    """passes over weights with unknown names"""

    def load_weights(self, stream: Iterator[tuple[str, torch.Tensor]]) -> None:
        names = {spec.name for spec in self.weight_specs()}
        super().load_weights(iter([item for item in stream if item[0] in names]))  # type: ignore[misc]


# ------------------------------------------------------------------------------------------------------ checkpoints


@caught_by(GOES_ON)
class ForgetsSchedule(Fault):
    """forgets the schedule in its checkpoint"""

    def load_checkpoint(self, path: str) -> int:
        step: int = super().load_checkpoint(path)  # type: ignore[misc]
        self._training().schedule_step = 0
        return step


@caught_by(GOES_ON)
class ForgetsOptimizer(Fault):
    """forgets the optimizer's state in its checkpoint"""

    def load_checkpoint(self, path: str) -> int:
        step: int = super().load_checkpoint(path)  # type: ignore[misc]
        fresh_with_weights(self)
        return step


@caught_by("test_a_full_disk_is_refused_on_all_ranks_and_the_older_checkpoint_stays")
class RemovesOlder(Fault):
    """removes the older checkpoint before the new one is whole"""

    def save_checkpoint(self, path: str, *, step: int) -> None:
        torch.distributed.barrier()
        shutil.rmtree(path, ignore_errors=True)
        super().save_checkpoint(path, step=step)  # type: ignore[misc]
