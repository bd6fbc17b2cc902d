"""What is seen of a run while it runs: a live panel on a terminal, one line a step elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from manymesh.recipes.grpo.tracking import REWARD, TIME

SPARKS = "▁▂▃▄▅▆▇█"

# What is shown, under which name, and how it is written.
COLUMNS = {
    REWARD: ("reward", "{:.3f}"),
    "actor/loss": ("loss", "{:+.4f}"),
    "actor/entropy": ("entropy", "{:.3f}"),
    "actor/ref_kl": ("ref KL", "{:.4f}"),
    "actor/approx_kl": ("KL", "{:.5f}"),
    "rollout/log_prob_gap_max": ("rollout gap", "{:.1e}"),
    "response/length_mean": ("length", "{:.1f}"),
    f"{TIME}tokens_per_second": ("tokens/s", "{:,.0f}"),
    f"{TIME}step": ("step s", "{:.3f}"),
}


class Phases:
    """Seconds spent in each phase of a step, in order of first appearance."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.running = ""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.running = name
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            self.running = ""


class Progress:
    """Shows a run's steps; a context manager around the loop.

    Args:
        console: where to.
        num_steps: at most this many.
        phases: the seconds of the step that runs now.
    """

    def __init__(self, console: Console, num_steps: int, phases: Phases) -> None:
        self._console, self._num_steps, self._phases = console, num_steps, phases
        self._step, self._metrics = 0, dict[str, float]()
        self._rewards: list[float] = []
        self._live = Live(get_renderable=self._panel, console=console, refresh_per_second=4, transient=False)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, step: int, metrics: Mapping[str, float], rewards: Sequence[float]) -> None:
        """A step is done."""
        self._step, self._metrics, self._rewards = step, dict(metrics), list(rewards)
        if not self._console.is_terminal:
            values = [f"{name} {form.format(value)}" for name, form, value in self._select_values()]
            phases = " ".join(f"{name} {seconds:.3f}" for name, seconds in self._seconds().items())
            line = f"step {step}/{self._num_steps}  " + "  ".join(values) + f"  ({phases})"
            self._console.print(line, highlight=False, soft_wrap=True)

    def note(self, message: str) -> None:
        self._console.print(message, highlight=False, soft_wrap=True)

    def warn(self, message: str) -> None:
        self._console.print(Text(f"WARNING: {message}", style="bold red"), soft_wrap=True)

    def _select_values(self) -> list[tuple[str, str, float]]:
        return [(*COLUMNS[key], self._metrics[key]) for key in COLUMNS if key in self._metrics]

    def _seconds(self) -> dict[str, float]:
        prefix = f"{TIME}phase/"
        return {key.removeprefix(prefix): s for key, s in self._metrics.items() if key.startswith(prefix)}

    def _panel(self) -> Group:
        head = Table.grid(padding=(0, 1))
        head.add_row(
            Text(f"step {self._step}/{self._num_steps}", style="bold"),
            ProgressBar(total=self._num_steps, completed=self._step, width=40),
            Text(sparkline(self._rewards), style="green"),
            Text(self._phases.running, style="dim"),
        )
        numbers, phases = Table.grid(padding=(0, 2)), Table.grid(padding=(0, 2))
        if values := self._select_values():
            numbers.add_row(*(Text(name, style="dim") for name, _, _ in values))
            numbers.add_row(*(form.format(value) for _, form, value in values))
        if seconds := self._seconds():
            phases.add_row(*(Text(name, style="dim") for name in seconds))
            phases.add_row(*(f"{value:.3f} s" for value in seconds.values()))
        return Group(head, numbers, phases)


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The last `width` values as a line of bars, between the smallest and the largest of them."""
    values = [value for value in values if value == value][-width:]
    low, high = min(values, default=0.0), max(values, default=0.0)
    span = (high - low) or 1.0
    return "".join(SPARKS[round((value - low) / span * (len(SPARKS) - 1))] for value in values)
