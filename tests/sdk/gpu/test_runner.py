"""The GPU run: each step by itself, whatever becomes of the one before."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from core.errors import Refused
from sdk.__main__ import main
from sdk.gpu import report
from sdk.gpu.outline import STEPS, select
from sdk.gpu.runner import StepResult, run_step, run_steps
from sdk.gpu.step import Note, Step, outcome_of


def step(name: str, number: str = "90", limit_s: float = 60) -> Step:
    return Step(number, name.replace("_", " "), limit_s, "What it measures.", f"tests.sdk.gpu.steps:{name}")


def lines_of(results: list[StepResult]) -> str:
    lines: list[str] = []
    report.show(results, lines.append)
    return "\n".join(lines)


@pytest.fixture(scope="module")
def results() -> list[StepResult]:
    names = ["measures", "goes_on_after_a_part", "raises", "is_absent", "dies", "no_such_function"]
    return list(run_steps([step(name, f"9{i}") for i, name in enumerate(names)], "cpu", 60))


def test_a_failure_of_one_step_does_not_end_the_rest(results: list[StepResult]) -> None:
    assert [each.outcome for each in results] == ["PASS", "FAIL", "FAIL", "ABSENT", "FAIL", "FAIL"]


def test_a_step_that_raises_fails_with_its_message_and_keeps_what_it_found(results: list[StepResult]) -> None:
    raised = results[2]
    assert raised.message == "RuntimeError: the engine is broken"
    assert "in raises" in raised.traceback
    assert raised.notes == (Note("before", "PASS"),)
    assert "a last word" in raised.log


def test_a_step_whose_process_dies_says_of_what(results: list[StepResult]) -> None:
    assert results[4].message == "its process died of SIGABRT"
    assert results[4].notes == (Note("before", "PASS"),)
    assert "no_such_function" in results[5].message


def test_a_part_that_raises_fails_and_the_step_goes_on_in_the_same_folder(results: list[StepResult]) -> None:
    assert results[1].notes == (
        Note("the first part", "FAIL", "ValueError: two lines"),
        Note("the second part", "ABSENT", "needs CUDA"),
        Note("what the step before made is there", "PASS"),
    )


def test_a_step_that_hangs_is_killed_at_its_limit_with_its_processes(tmp_path: Path) -> None:
    result = run_step(step("hangs"), "cpu", tmp_path, limit_s=1.0)
    assert (result.outcome, result.message) == ("FAIL", "not done within 1 s")
    assert 1.0 <= result.seconds < 10
    (pid,) = (note.value for note in result.notes)
    assert pid is not None
    deadline = time.monotonic() + 10
    while is_alive(int(pid)):
        assert time.monotonic() < deadline, "a process of the step lives on"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_a_step_that_does_not_start_is_killed(tmp_path: Path) -> None:
    result = run_step(step("measures"), "cpu", tmp_path, limit_s=60, start_s=0.05)
    assert (result.outcome, result.message, result.notes) == ("FAIL", "not started within 0.05 s", ())


def test_what_would_begin_when_the_time_of_the_run_is_over_is_absent() -> None:
    (result,) = run_steps([step("measures")], "cpu", 0)
    assert result.outcome == "ABSENT"
    assert "0 s of the run are over" in result.message


def test_steps_are_selected_by_number_in_the_outlines_order() -> None:
    assert [each.number for each in select("03, 1")] == ["01", "03"]
    assert select("") == list(STEPS)
    with pytest.raises(Refused, match="no step has the number 77"):
        select("77")


def test_steps_have_numbers_in_order_and_say_what_they_measure() -> None:
    assert [each.number for each in STEPS] == [f"{number:02}" for number in range(len(STEPS))]
    assert all(each.measures.endswith(".") and each.limit_s > 0 for each in STEPS)


def test_a_step_with_figures_passes_and_one_with_nothing_is_absent() -> None:
    assert outcome_of([Note("a", "FIGURE", value=1.0), Note("b", "ABSENT")]) == "PASS"
    assert outcome_of([Note("a", "PASS"), Note("b", "FAIL")]) == "FAIL"
    assert outcome_of([Note("b", "ABSENT")]) == outcome_of([]) == "ABSENT"


def test_the_report_says_all_in_lines_and_in_json(results: list[StepResult], tmp_path: Path) -> None:
    text = lines_of(results)
    assert "90 measures" in text
    assert "speed: 12.5 GB/s (of 20)" in text
    assert "FAIL   the first part: ValueError: two lines" in text
    assert text.splitlines()[-1].startswith("1 passed, 4 failed, 1 absent")

    report.write(results, "cpu", tmp_path / "made" / "gpu.json")
    data = json.loads((tmp_path / "made" / "gpu.json").read_text())
    assert (data["schema"], data["passed"], data["device"]) == (1, False, "cpu")
    assert "torch" in data["versions"]
    assert data["steps"][0]["notes"][1] == {
        "name": "speed",
        "outcome": "FIGURE",
        "detail": "of 20",
        "value": 12.5,
        "unit": "GB/s",
    }
    assert data["steps"][2]["message"] == "RuntimeError: the engine is broken"
    assert set(data["steps"][0]) == {
        *("number", "title", "limit_s", "measures"),
        *("outcome", "seconds", "message", "traceback", "log", "notes"),
    }


def test_the_command_lists_runs_and_gives_the_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert main(["gpu", "--list"]) == 0
    listed = capsys.readouterr().out
    assert all(f"{each.number} {each.title}" in listed and each.measures in listed for each in STEPS)
    monkeypatch.setattr("sdk.gpu.outline.STEPS", (step("measures", "00"), step("raises", "01")))
    assert main(["gpu", "--only", "00", "--device", "cpu", "--json", str(tmp_path / "a.json")]) == 0
    assert json.loads((tmp_path / "a.json").read_text())["passed"]
    assert main(["gpu", "--device", "cpu"]) == 1
    assert main(["gpu", "--only", "55"]) == 2
