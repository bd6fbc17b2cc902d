"""What a run leaves behind: metrics, samples, curve, checkpoints, and what is seen of it."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from core.errors import Refused
from manymesh.recipes.grpo.checkpoints import Checkpoints
from manymesh.recipes.grpo.progress import Phases, Progress, sparkline
from manymesh.recipes.grpo.tracking import REWARD, Tracker, read_metrics


def track(directory: Path, steps: Iterable[int], start: int = 0) -> Any:
    tracker = Tracker(directory, start)
    for step in steps:
        tracker.log(step, {REWARD: step / 10, "x": 1.0}, [{"completion": f"c{step}", "reward": 0.5}])
    tracker.close()
    return tracker


def test_each_step_is_a_line_that_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path)
    tracker.log(1, {REWARD: 0.5}, [{"completion": "é", "reward": 0.5}])
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, REWARD: 0.5}]
    assert read_metrics(tmp_path / "samples.jsonl") == [{"step": 1, "completion": "é", "reward": 0.5}]
    tracker.close()


def test_a_resumed_run_cuts_off_later_steps_and_what_a_kill_left_half_written(tmp_path: Path) -> None:
    track(tmp_path, range(1, 6))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rewa')
    tracker = track(tmp_path, [4], start=3)
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert [line["step"] for line in read_metrics(tmp_path / name)] == [1, 2, 3, 4]
    assert tracker.rewards() == [0.1, 0.2, 0.3, 0.4]


def test_tensorboard_shows_the_steps_of_a_resumed_run_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing import event_accumulator  # type: ignore[import-untyped]

    track(tmp_path, range(1, 6))
    track(tmp_path, [4, 5], start=3)
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars(REWARD)] == [1, 2, 3, 4, 5]


def test_numbers_that_json_does_not_know_are_written_as_null(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path)
    tracker.log(1, {REWARD: float("nan"), "x": float("inf")})
    tracker.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, REWARD: None, "x": None}
    assert Tracker(tmp_path, 1).rewards() == []


def test_the_curve_is_a_picture_and_absent_before_the_first_step(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path)
    assert tracker.draw() is None
    tracker.log(1, {REWARD: 0.5, "reward/std": 0.1})
    assert tracker.draw() == tmp_path / "reward.png"
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    tracker.close()


def save(checkpoints: Checkpoints, step: int, text: str = "x") -> Any:
    def write(path: str) -> None:
        with open(path, "w") as file:
            file.write(text)

    return checkpoints.save(step, write)


def test_the_last_checkpoints_are_kept_and_the_latest_is_by_number(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=2)
    assert checkpoints.latest() is None
    for step in (5, 9, 10):
        save(checkpoints, step)
    assert [step for step, _ in checkpoints.complete()] == [9, 10]
    assert checkpoints.latest() == (10, tmp_path / "checkpoints" / "step-10")
    assert sorted(entry.name for entry in checkpoints.directory.iterdir()) == ["step-10", "step-9"]


def test_a_checkpoint_that_was_cut_short_is_never_loaded_and_is_written_anew(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    save(checkpoints, 1)

    def killed(path: str) -> None:
        save_half = tmp_path / "step-2" / "half"
        save_half.write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(2, killed)
    assert checkpoints.latest() == (1, tmp_path / "step-1")
    save(checkpoints, 2)
    assert sorted(entry.name for entry in (tmp_path / "step-2").iterdir()) == ["actor", "run.json"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), Refused("disk full")])
def test_a_failed_save_is_refused_leaves_nothing_and_keeps_the_earlier_ones(tmp_path: Path, error: Exception) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    save(checkpoints, 1)

    def fail(path: str) -> None:
        (tmp_path / "step-2" / "half").write_text("x")
        raise error

    with pytest.raises(Refused) as refused:
        checkpoints.save(2, fail)
    assert "No space left" in str(refused.value) or "disk full" in str(refused.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-1"]


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(Refused, match="step 3"):
        save(Checkpoints(tmp_path / "file"), 3)


METRICS = {REWARD: 0.25, "actor/loss": -0.1, "time/step": 1.5, "time/phase/generate": 1.25}


def test_without_a_terminal_each_step_is_one_plain_line() -> None:
    out = io.StringIO()
    with Progress(Console(file=out, width=40), 10, Phases()) as progress:
        progress.show(3, METRICS, [0.1, 0.25])
    (line,) = out.getvalue().splitlines()
    for part in ("step 3/10", "reward 0.250", "loss -0.1000", "step s 1.500", "generate 1.250"):
        assert part in line


def test_on_a_terminal_a_panel_shows_numbers_phases_and_what_is_running() -> None:
    out = io.StringIO()
    phases = Phases()
    with Progress(Console(file=out, force_terminal=True, width=120), 10, phases) as progress, phases("update"):
        progress.show(3, METRICS, [0.1, 0.25])
    text = out.getvalue()
    for part in ("step 3/10", "0.250", "generate", "1.250 s", sparkline([0.1, 0.25])):
        assert part in text


def test_phases_add_up_and_survive_an_error() -> None:
    phases = Phases()
    for _ in range(2):
        with phases("a"):
            pass
    with pytest.raises(ValueError), phases("b"):
        raise ValueError
    assert list(phases.seconds) == ["a", "b"]
    assert phases.running == ""


def test_a_sparkline_runs_from_the_smallest_to_the_largest_value() -> None:
    assert sparkline([0, 0.5, 1]) == "▁▅█"
    assert sparkline([2, 2]) == "▁▁"
    assert sparkline([]) == ""
    assert len(sparkline(range(100), width=30)) == 30
