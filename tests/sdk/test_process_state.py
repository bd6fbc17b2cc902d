"""What a backend may leave behind in its process is read, compared and put back."""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sdk.conformance.process_state import FACTS, left_behind, process_state, restore


def set_default_device() -> None:
    torch.set_default_device("meta")


CHANGES: dict[str, Callable[[], object]] = {
    "environment": lambda: os.environ.update(MANYMESH_TEST="1"),
    "working directory": lambda: os.chdir(Path.cwd().parent),
    "sys.path": lambda: sys.path.append("/nowhere"),
    "signal handlers": lambda: signal.signal(signal.SIGUSR1, lambda number, frame: None),
    "filters of warnings": lambda: warnings.filterwarnings("ignore", message="of this test"),
    "the root logger": lambda: logging.getLogger().setLevel(5),
    "torch's default dtype": lambda: torch.set_default_dtype(torch.float64),
    "torch's default device": set_default_device,
    "torch's deterministic algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "torch's number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "torch's grad mode": lambda: torch.set_grad_enabled(False),
    "torch's precision of matmuls": lambda: torch.set_float32_matmul_precision("medium"),
}


@pytest.mark.parametrize("kind", FACTS)
def test_a_change_is_noticed_and_put_back(kind: str) -> None:
    before = process_state()
    try:
        CHANGES[kind]()
        assert kind in left_behind(before, process_state())
    finally:
        restore(before)
    assert left_behind(before, process_state()) == {}


def test_a_difference_names_what_changed() -> None:
    before = process_state()
    after = before | {"environment": before["environment"] | {"MANYMESH_TEST": "1"}}
    assert left_behind(before, after) == {"environment": "MANYMESH_TEST: was None, is '1'"}
    after = before | {"sys.path": (*before["sys.path"], "/nowhere")}
    assert left_behind(before, after) == {"sys.path": "gone [], come ['/nowhere']"}
