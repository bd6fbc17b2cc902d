"""The process of one step: `python -m sdk.gpu.child FUNCTION DEVICE FOLDER FILE`.

FILE gets a line of JSON when the step starts, one for each note, and one when it ends.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import attrs

from sdk.gpu.step import Absent, Note, StepRun, one_line


def main(arguments: Sequence[str]) -> None:
    """Run the step. The process ends at once then: no library's threads can hold it."""
    name, device, folder, file = arguments
    with Path(file).open("a") as lines:
        run_step(name, device, Path(folder), lines)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_step(name: str, device: str, folder: Path, lines: IO[str]) -> None:
    """Import the step's function, call it, and write what comes of it."""

    def say(**values: Any) -> None:
        lines.write(json.dumps(values) + "\n")
        lines.flush()

    def write(note: Note) -> None:
        say(note=attrs.asdict(note))

    module, function = name.split(":")
    try:
        step = getattr(importlib.import_module(module), function)
        say(started=True)
        step(StepRun(device, folder, write))
    except Absent as absent:
        write(Note("the step", "ABSENT", str(absent)))
    except BaseException as error:
        say(error=one_line(error), traceback=traceback.format_exc())
        return
    say(ended=True)


if __name__ == "__main__":
    main(sys.argv[1:])
