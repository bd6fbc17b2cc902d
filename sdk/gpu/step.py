"""What a step of the GPU run is, and how it says what it found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import attrs

Outcome = Literal["PASS", "FAIL", "ABSENT"]


@attrs.frozen
class Step:
    """One step; it runs in a process of its own.

    Attributes:
        number: two digits, by which it is asked for.
        limit_s: it is killed after so many seconds on a GPU.
        measures: what it measures, in a sentence or two.
        function: "module:function", imported in the step's process and called with a StepRun.
    """

    number: str
    title: str
    limit_s: float
    measures: str
    function: str


@attrs.frozen
class Note:
    """One finding of a step: a check with its outcome, or a figure.

    Attributes:
        detail: of a check that failed or could not be made, why; of a figure, what it is to be compared with.
        value, unit: of a figure.
    """

    name: str
    outcome: Literal["PASS", "FAIL", "ABSENT", "FIGURE"]
    detail: str = ""
    value: float | None = None
    unit: str = ""

    def line(self) -> str:
        if self.value is None:
            return f"{self.outcome:<6} {self.name}{f': {self.detail}' if self.detail else ''}"
        unit = f" {self.unit}" if self.unit else ""
        return f"       {self.name}: {self.value:.4g}{unit}{f' ({self.detail})' if self.detail else ''}"


class Absent(Exception):
    """A step, or a part of one, cannot be run here; the message says why."""


class StepRun:
    """What a step's function is called with: where it runs, and what it says its findings to.

    Args:
        write: takes each note as it comes, so that a step that is killed keeps what it found.

    Attributes:
        device: "cuda" or "cpu".
        folder: of the whole run: models that a step makes are there for those after it.
        about: stands before the name of each note.
    """

    def __init__(self, device: str, folder: Path, write: Callable[[Note], None], about: str = "") -> None:
        self.device, self.folder, self.about = device, folder, about
        self._write_note = write

    def named(self, about: str) -> StepRun:
        """The same, for notes about one thing of several."""
        return StepRun(self.device, self.folder, self._write_note, f"{self.about}{about}: ")

    def _write(self, note: Note) -> None:
        self._write_note(attrs.evolve(note, name=self.about + note.name))

    @property
    def on_cuda(self) -> bool:
        return self.device == "cuda"

    def check(self, name: str, holds: bool, detail: str = "") -> None:
        """PASS where it holds, else FAIL."""
        self._write(Note(name, "PASS" if holds else "FAIL", detail))

    def figure(self, name: str, value: float, unit: str = "", detail: str = "") -> None:
        self._write(Note(name, "FIGURE", detail, float(value), unit))

    def absent(self, name: str, why: str) -> None:
        self._write(Note(name, "ABSENT", why))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of a step: what is raised in it is noted, and the step goes on."""
        try:
            yield
        except Absent as absent:
            self.absent(name, str(absent))
        except Exception as error:
            self.check(name, False, one_line(error))

    def need_cuda(self) -> None:
        """Raises Absent on a CPU."""
        if not self.on_cuda:
            raise Absent("needs CUDA")


def outcome_of(notes: Sequence[Note]) -> Outcome:
    """FAIL where a check failed; ABSENT where there is neither a check that passed nor a figure."""
    outcomes = {note.outcome for note in notes}
    if "FAIL" in outcomes:
        return "FAIL"
    return "PASS" if outcomes & {"PASS", "FIGURE"} else "ABSENT"


def one_line(error: BaseException) -> str:
    """Type and message, in one line that can be read."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]
