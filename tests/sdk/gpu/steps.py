"""Steps for tests of the runner; they are called in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from sdk.gpu.step import Absent, StepRun


def measures(run: StepRun) -> None:
    run.check("it holds", True)
    run.figure("speed", 12.5, "GB/s", "of 20")
    (run.folder / "made").write_text("by a step")


def goes_on_after_a_part(run: StepRun) -> None:
    with run.part("the first part"):
        _raise(ValueError("two\nlines"))
    with run.part("the second part"):
        run.need_cuda()
    run.check("what the step before made is there", (run.folder / "made").read_text() == "by a step")


def _raise(error: Exception) -> None:
    raise error


def raises(run: StepRun) -> None:
    run.check("before", True)
    print("a last word")
    raise RuntimeError("the engine is broken")


def is_absent(run: StepRun) -> None:
    raise Absent("no such library")


def hangs(run: StepRun) -> None:
    """With a process that outlives a parent which is merely killed."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    run.figure("pid", child.pid)
    time.sleep(600)


def dies(run: StepRun) -> None:
    run.check("before", True)
    os.abort()
