"""State of a process that a backend shares with everything else in it, and must leave as it was.

`process_state` reads it, `left_behind` compares two readings, and `restore` puts one back, so that what one test finds
doesn't reach the next.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch


@attrs.frozen
class Fact:
    """One kind of process-wide state: how it is read, and put back."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]


def _set_environment(variables: Mapping[str, str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def _set_determinism(flags: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(flags[0], warn_only=flags[1])


def _signal_handlers() -> dict[str, Any]:
    return {each.name: signal.getsignal(each) for each in sorted(signal.valid_signals() & set(signal.Signals))}


def _set_signal_handlers(handlers: Mapping[str, Any]) -> None:
    for name, handler in handlers.items():
        if handler is not None and signal.getsignal(signal.Signals[name]) != handler:  # None: not of Python
            signal.signal(signal.Signals[name], handler)


def _logging() -> dict[str, Any]:
    root = logging.getLogger()
    return {"level": root.level, "handlers": tuple(root.handlers), "disabled up to": root.manager.disable}


def _set_logging(state: Mapping[str, Any]) -> None:
    root = logging.getLogger()
    root.setLevel(state["level"])
    root.handlers[:] = state["handlers"]
    logging.disable(state["disabled up to"])


def _set_filters(filters: Sequence[Any]) -> None:
    warnings.filters[:] = filters  # type: ignore[index]


def _set_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)


FACTS: Mapping[str, Fact] = {
    "environment": Fact(lambda: dict(os.environ), _set_environment),
    "working directory": Fact(os.getcwd, os.chdir),
    "sys.path": Fact(lambda: tuple(sys.path), lambda path: sys.path.__setitem__(slice(None), path)),
    "signal handlers": Fact(_signal_handlers, _set_signal_handlers),
    "filters of warnings": Fact(lambda: tuple(warnings.filters), _set_filters),
    "the root logger": Fact(_logging, _set_logging),
    "torch's default dtype": Fact(torch.get_default_dtype, torch.set_default_dtype),
    "torch's default device": Fact(torch.get_default_device, _set_device),
    "torch's deterministic algorithms": Fact(
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        _set_determinism,
    ),
    "torch's number of threads": Fact(torch.get_num_threads, torch.set_num_threads),
    "torch's grad mode": Fact(torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's precision of matmuls": Fact(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
}


def process_state() -> dict[str, Any]:
    """The state of this process now, by kind."""
    return {name: fact.read() for name, fact in FACTS.items()}


def left_behind(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """What differs, by kind: what it was and what it is, in words that can be sent from a rank."""
    return {name: _difference(before[name], after[name]) for name in before if before[name] != after[name]}


def restore(state: Mapping[str, Any]) -> None:
    """Put back what differs from now."""
    for name, value in state.items():
        if FACTS[name].read() != value:
            FACTS[name].write(value)


def _difference(before: Any, after: Any) -> str:
    if isinstance(before, Mapping):
        names = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
        return "; ".join(f"{name}: was {before.get(name)!r}, is {after.get(name)!r}" for name in names)
    if isinstance(before, tuple) and len(before) != len(after):
        lost, new = ([each for each in some if each not in other] for some, other in ((before, after), (after, before)))
        return f"gone {lost}, come {new}"
    return f"was {before!r}, is {after!r}"
