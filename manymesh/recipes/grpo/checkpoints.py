"""The checkpoints of a run: checkpoints/step-N, complete once both its parts are there, the oldest dropped."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import attrs

from core.errors import Refused


@attrs.frozen
class Checkpoints:
    """Checkpoints under one directory, which all nodes of the cluster share.

    step-N/actor is the workers', step-N/run.json the driver's. A checkpoint that lacks either was cut short, and is
    never loaded: an engine that writes in the background gives its part its name after run.json is there.
    """

    directory: Path
    keep_last: int = 2

    def complete(self) -> list[tuple[int, Path]]:
        """Step and directory of every complete checkpoint, oldest first."""
        result = []
        for entry in self.directory.glob("step-*"):
            match = re.fullmatch(r"step-(\d+)", entry.name)
            if match and (entry / "run.json").is_file() and (entry / "actor").exists():
                result.append((int(match[1]), entry))
        return sorted(result)

    def latest(self) -> tuple[int, Path] | None:
        return max(self.complete(), default=None)

    def save(self, step: int, write: Callable[[str], object]) -> Path:
        """Let `write` fill the directory it is given, declare the checkpoint complete, drop the oldest.

        Raises:
            Refused: it could not be written. Earlier checkpoints are still there, and nothing of this one is.
        """
        path = self.directory / f"step-{step}"
        try:
            shutil.rmtree(path, ignore_errors=True)  # of an earlier start that was cut short
            path.mkdir(parents=True)
            write(str(path / "actor"))
            spare = path / "run.json.tmp"
            spare.write_text(json.dumps({"step": step}))
            os.replace(spare, path / "run.json")
        except (OSError, Refused) as error:
            shutil.rmtree(path, ignore_errors=True)
            if isinstance(error, Refused):
                raise
            raise Refused(f"the checkpoint of step {step} could not be written", have=error, where=str(path)) from error
        for _, old in self.complete()[: -self.keep_last]:
            shutil.rmtree(old, ignore_errors=True)
        return path
