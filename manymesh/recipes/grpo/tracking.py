"""What a run leaves in its directory: metrics, samples, TensorBoard events and the reward's curve.

config.yaml      the config as it ran
metrics.jsonl    one line a step
samples.jsonl    some completions of each step, with their rewards
tensorboard/     the metrics again
reward.png       mean reward by step
checkpoints/     see checkpoints.py
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

REWARD = "reward/mean"
TIME = "time/"  # prefix of the metrics that differ between two runs of one seed


class Tracker:
    """Appends a run's metrics, each step at once and flushed.

    Args:
        directory: of the run; made where it is missing.
        step: the step that the run goes on from. What the files hold of later steps is cut off.

    Attributes:
        history: the metrics of all steps so far, those of earlier starts included.
    """

    def __init__(self, directory: str | Path, step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.history = _truncate(self.directory / "metrics.jsonl", step)
        _truncate(self.directory / "samples.jsonl", step)
        self._metrics = _append(self.directory / "metrics.jsonl")
        self._samples = _append(self.directory / "samples.jsonl")
        self._events = SummaryWriter(self.directory / "tensorboard", purge_step=step + 1)

    def log(self, step: int, metrics: Mapping[str, float], samples: Sequence[Mapping[str, Any]] = ()) -> None:
        """Write a step's metrics and sample completions.

        Raises:
            OSError: they could not be written; the step stays in `history`.
        """
        line = {"step": step, **metrics}
        self.history.append(line)
        _write(self._metrics, [line])
        _write(self._samples, [{"step": step, **sample} for sample in samples])
        for name, value in metrics.items():
            self._events.add_scalar(name, value, step)

    def rewards(self) -> list[float]:
        """Mean reward of each step so far."""
        return [float(line[REWARD]) for line in self.history if line.get(REWARD) is not None]

    def draw(self) -> Path | None:
        """Draw reward.png anew; None where there is no step yet.

        Raises:
            OSError: it could not be written.
        """
        if not self.history:
            return None
        file = self.directory / "reward.png"
        draw_curve(self.history, file)
        return file

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()
        self._events.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; empty where there is none. A line cut short by a kill is left out."""
    file = Path(path)
    lines = []
    for text in file.read_text().splitlines() if file.exists() else []:
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


def draw_curve(history: Sequence[Mapping[str, Any]], file: Path, smooth: int = 5) -> None:
    """Mean reward by step with its band of one standard deviation, and a running mean over `smooth` steps."""
    from matplotlib.figure import Figure  # without pyplot: no window system, no state of the process

    points = [line for line in history if line.get(REWARD) is not None]
    steps = [line["step"] for line in points]
    rewards = [line[REWARD] for line in points]
    spread = [line.get("reward/std") or 0.0 for line in points]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    low = [r - s for r, s in zip(rewards, spread, strict=True)]
    high = [r + s for r, s in zip(rewards, spread, strict=True)]
    axes.fill_between(steps, low, high, alpha=0.15, label="one standard deviation")
    axes.plot(steps, rewards, ".-", lw=0.8, alpha=0.6, label="mean of the step")
    running = [sum(rewards[max(0, i - smooth + 1) : i + 1]) / min(i + 1, smooth) for i in range(len(rewards))]
    axes.plot(steps, running, lw=2, label=f"running mean of {smooth}")
    axes.set(xlabel="step", ylabel="reward")
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize="small")
    figure.savefig(file, dpi=120)


def _truncate(file: Path, step: int) -> list[dict[str, Any]]:
    """Cut off the lines of later steps, whole or not; give what is left."""
    lines = [line for line in read_metrics(file) if line["step"] <= step]
    if file.exists():
        spare = file.with_suffix(".tmp")
        with spare.open("w") as out:
            _write(out, lines)
        os.replace(spare, file)
    return lines


def _append(file: Path) -> IO[str]:
    return file.open("a", encoding="utf-8")


def _write(file: IO[str], lines: Sequence[Mapping[str, Any]]) -> None:
    file.writelines(json.dumps(_strict(line), ensure_ascii=False) + "\n" for line in lines)
    file.flush()


def _strict(line: Mapping[str, Any]) -> dict[str, Any]:
    """JSON knows no nan and no inf."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in line.items()
    }
