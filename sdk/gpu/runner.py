"""Running the steps, each in a process of its own: what crashes, hangs or spoils its process ends one step alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from sdk.gpu.step import Note, Outcome, Step, outcome_of

START_S = 180.0  # for what a step imports, on a cold disk
ON_CPU = 10.0  # there limits are so many times longer: the program is tested, not the machine
LOG_LINES = 40


@attrs.frozen
class StepResult:
    """What became of a step.

    Attributes:
        message: of a step that failed as a whole or was not run, why; in one line.
        traceback: of what it raised.
        log: the last lines that its process printed, where it failed.
        seconds: from its start, imports not counted.
    """

    step: Step
    outcome: Outcome
    notes: tuple[Note, ...]
    seconds: float = 0.0
    message: str = ""
    traceback: str = ""
    log: tuple[str, ...] = ()


def run_steps(steps: Sequence[Step], device: str, limit_s: float) -> Iterator[StepResult]:
    """The steps one after the other; each result when it is there.

    Args:
        device: "cuda" or "cpu".
        limit_s: for all together: what would begin later is absent.
    """
    slower = 1.0 if device == "cuda" else ON_CPU
    end = time.monotonic() + limit_s * slower
    with tempfile.TemporaryDirectory(prefix="manymesh-gpu-") as folder:
        for step in steps:
            remaining_s = end - time.monotonic()
            if remaining_s <= 0:
                why = f"the {limit_s * slower:g} s of the run are over"
                yield StepResult(step, "ABSENT", (Note("the step", "ABSENT", why),), message=why)
                continue
            yield run_step(step, device, Path(folder), min(step.limit_s * slower, remaining_s))


def run_step(step: Step, device: str, folder: Path, limit_s: float, start_s: float = START_S) -> StepResult:
    """One step, killed with all its processes when its time is over.

    Args:
        folder: of the run.
        limit_s: from when its function is called.
        start_s: for its process to come that far.
    """
    file, log = folder / f"{step.number}.jsonl", folder / f"{step.number}.log"
    file.write_text("")
    command = [sys.executable, "-m", "sdk.gpu.child", step.function, device, str(folder), str(file)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    born, started = time.monotonic(), 0.0
    over = ""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            while process.poll() is None and not over:
                time.sleep(0.02)
                now = time.monotonic()
                if not started:
                    started = now if file.stat().st_size else 0.0
                    over = f"not started within {start_s:g} s" if now - born > start_s else ""
                elif now - started > limit_s:
                    over = f"not done within {limit_s:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # it is the leader of its session: what it left goes too
            process.wait()
    seconds = time.monotonic() - started if started else 0.0
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return result_of(step, read(file), over or died(process.returncode), seconds, tuple(lines))


def read(file: Path) -> list[dict[str, Any]]:
    """What a step wrote; a line that it was killed in is left out."""
    entries = []
    for line in file.read_text().splitlines():
        with suppress(json.JSONDecodeError):
            entries.append(json.loads(line))
    return entries


def died(code: int | None) -> str:
    if code is not None and code < 0:
        return f"its process died of {signal.Signals(-code).name}"
    return f"its process ended with exit code {code}"


def result_of(
    step: Step, entries: Sequence[dict[str, Any]], ending: str, seconds: float, log: tuple[str, ...]
) -> StepResult:
    """What the entries of a step's file come to.

    Args:
        ending: how its process ended; of meaning only where the step didn't say itself that it is done.
    """
    notes = tuple(Note(**entry["note"]) for entry in entries if "note" in entry)
    error = next((entry for entry in entries if "error" in entry), None)
    if error is not None:
        return StepResult(step, "FAIL", notes, seconds, error["error"], error["traceback"], log)
    if not any("ended" in entry for entry in entries):
        return StepResult(step, "FAIL", notes, seconds, ending, "", log)
    outcome = outcome_of(notes)
    return StepResult(step, outcome, notes, seconds, log=log if outcome == "FAIL" else ())
