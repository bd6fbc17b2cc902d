"""Faults of engines and rollouts alike: process-wide state that they change and don't put back."""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings

import torch

from tests.sdk.kit.faults import Fault, caught_by

STATE = "test_process_wide_state_is_left_as_it_was"


class LeavesState(Fault):
    """Base: changes something when it is initialized."""

    def initialize(self) -> None:
        super().initialize()  # type: ignore[misc]
        self.change()

    def change(self) -> None:
        raise NotImplementedError


@caught_by(STATE)
class SetsEnvironment(LeavesState):
    """sets an environment variable"""

    def change(self) -> None:
        os.environ["MANYMESH_MUTANT"] = "left"


@caught_by(STATE)
class SetsDeterminism(LeavesState):
    """makes torch's algorithms deterministic, for everybody"""

    def change(self) -> None:
        torch.use_deterministic_algorithms(True, warn_only=True)


@caught_by(STATE)
class SetsPrecision(LeavesState):
    """lowers the precision of everybody's matmuls"""

    def change(self) -> None:
        torch.set_float32_matmul_precision("medium")


@caught_by(STATE)
class SetsThreads(LeavesState):
    """changes torch's number of threads"""

    def change(self) -> None:
        torch.set_num_threads(torch.get_num_threads() + 1)


@caught_by(STATE)
class TakesSignals(LeavesState):
    """takes SIGTERM for itself"""

    def change(self) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: None)


@caught_by(STATE)
class HidesWarnings(LeavesState):
    """hides warnings"""

    def change(self) -> None:
        warnings.filterwarnings("ignore", message="of a mutant")


@caught_by(STATE)
class SilencesLogging(LeavesState):
    """sets the level of the root logger"""

    def change(self) -> None:
        logging.getLogger().setLevel(logging.CRITICAL)


@caught_by(STATE)
class ExtendsPath(LeavesState):
    """puts a folder of its own on sys.path"""

    def change(self) -> None:
        sys.path.insert(0, "/mutant")
