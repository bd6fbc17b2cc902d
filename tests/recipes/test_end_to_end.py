"""The loop with real workers: in this process where one rank will do, and once on Ray with two."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from core.dispatch import register
from core.errors import Refused
from core.group import RayClassWithInitArgs
from core.transport.local import LocalWorkerGroup
from manymesh.recipes.grpo.config import GrpoConfig
from manymesh.recipes.grpo.placement import Placement
from manymesh.recipes.grpo.reward import RewardError, digit_share
from manymesh.recipes.grpo.tracking import REWARD, TIME, read_metrics
from manymesh.recipes.grpo.trainer import GrpoTrainer
from manymesh.recipes.grpo.workers import Workers
from manymesh.recipes.toy import write_model
from manymesh.workers import ActorRolloutRefWorker

STEPS = 5


def config_of(toy: Path, directory: Path, **sections: Any) -> Any:
    plain: dict[str, Any] = {
        "model": {"path": str(toy / "model")},
        "data": {"path": str(toy / "copy.jsonl")},
        "reward": {"function": "manymesh.recipes.grpo.reward:digit_share"},
        "pool": {"processes": [1], "use_gpu": False},
        "actor": {"engine": {"optimizer": {"lr": 3e-3}}},
        "sampling": {"num_samples": 4, "max_new_tokens": 4},
        "algorithm": {"prompts_per_step": 4},
        "run": {"dir": str(directory), "steps": STEPS, "save_every": 2},
    }
    for name, section in sections.items():
        plain[name] = {**plain.get(name, {}), **section}
    return GrpoConfig.of(plain)


def train(config: GrpoConfig, *, resume: bool = False, out: Any = None) -> Any:
    """Run in this process; gives the result."""
    console = Console(file=out or sys.stdout, width=200)
    trainer = GrpoTrainer(config, resume=resume)
    with LocalWorkerGroup(RayClassWithInitArgs(ActorRolloutRefWorker, Placement(config).worker())) as group:
        return trainer.run(Workers.shared(group), console)


def timeless(directory: Path) -> Any:
    """The run's metrics without those that are times."""
    lines = read_metrics(directory / "metrics.jsonl")
    return [{key: value for key, value in line.items() if not key.startswith(TIME)} for line in lines]


@pytest.fixture
def reward_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The names of a module, whose `reward` tests replace."""
    module = types.ModuleType("reward_of_test")
    vars(module)["reward"] = digit_share
    monkeypatch.setitem(sys.modules, "reward_of_test", module)
    return vars(module)


@pytest.fixture(scope="module")
def unbroken(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Directory of a run that nothing disturbed."""
    directory = tmp_path_factory.mktemp("runs") / "unbroken"
    train(config_of(toy, directory))
    return directory


def test_a_run_leaves_metrics_samples_curve_config_and_checkpoints(unbroken: Path, toy: Path) -> None:
    lines = read_metrics(unbroken / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        assert 0 <= line[REWARD] <= 1
        assert 1 <= line["response/length_mean"] <= 4
        assert line["actor/entropy"] > 0
        assert line["actor/grad_norm"] > 0
        assert line["actor/ratio_max"] == pytest.approx(1, abs=1e-4)
        assert line["rollout/log_prob_gap_max"] < 1e-4
        phases = [key.removeprefix("time/phase/") for key in line if key.startswith("time/phase/")]
        assert phases == ["prompts", "generate", "reward", "old_log_prob", "advantage", "update", "sync"]
        assert sum(line[f"time/phase/{name}"] for name in phases) <= line["time/step"]
    samples = read_metrics(unbroken / "samples.jsonl")
    assert len(samples) == 4 * STEPS
    for sample in samples:
        assert digit_share([sample["completion"]], [{"answer": sample["prompt"]}]) == [sample["reward"]]
    assert (unbroken / "reward.png").stat().st_size > 1000
    assert GrpoConfig.of(yaml.safe_load((unbroken / "config.yaml").read_text())) == config_of(toy, unbroken)
    assert sorted(path.name for path in (unbroken / "checkpoints").iterdir()) == ["step-4", "step-5"]


def test_a_run_that_was_interrupted_and_resumed_has_the_metrics_of_an_unbroken_one(
    unbroken: Path, toy: Path, tmp_path: Path, reward_module: dict[str, Any]
) -> None:
    calls = []

    def reward(completions: list[str], rows: Any) -> Any:
        calls.append(len(rows))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return digit_share(completions, rows)

    reward_module["reward"] = reward
    config = config_of(toy, tmp_path / "run", reward={"function": "reward_of_test:reward"})
    with pytest.raises(KeyboardInterrupt):
        train(config)
    assert [line["step"] for line in timeless(tmp_path / "run")] == [1, 2, 3]
    assert (tmp_path / "run" / "reward.png").exists()

    result = train(config, resume=True)
    assert timeless(tmp_path / "run") == timeless(unbroken)
    assert len(calls) == 4 + 3  # steps 3, 4, 5: the checkpoint is of step 2
    assert (result.step, len(result.rewards)) == (STEPS, STEPS)


def test_a_finished_run_is_resumed_to_more_steps_and_says_what_the_config_changed(
    unbroken: Path, toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config_of(toy, tmp_path / "run", run={"steps": 2}))
    train(config_of(toy, tmp_path / "run"), resume=True)
    assert timeless(tmp_path / "run") == timeless(unbroken)
    output = capsys.readouterr().out
    assert "resumes at step 2" in output
    assert "run.steps: 2 -> 5" in output


def test_resume_without_a_checkpoint_starts_from_nothing(unbroken: Path, toy: Path, tmp_path: Path) -> None:
    train(config_of(toy, tmp_path / "run"), resume=True)
    assert timeless(tmp_path / "run") == timeless(unbroken)


@pytest.fixture
def small_files() -> Any:
    """A call after which no file can grow beyond 20 kB, as on a full disk; lifted after the test."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_failing_save_is_said_loudly_keeps_the_last_good_checkpoint_and_training_goes_on(
    unbroken: Path,
    toy: Path,
    tmp_path: Path,
    reward_module: dict[str, Any],
    small_files: Callable[[], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = []

    def reward(completions: list[str], rows: Any) -> Any:
        calls.append(len(rows))
        if len(calls) == 4:
            small_files()
        return digit_share(completions, rows)

    reward_module["reward"] = reward
    directory = tmp_path / "run"
    config = config_of(toy, directory, reward={"function": "reward_of_test:reward"})
    with pytest.raises(Refused):  # the save at the end fails too, and then the run has failed
        train(config)
    output = capsys.readouterr().out
    assert "WARNING: no checkpoint at step 4, training goes on" in output
    assert "step-2" in output
    assert [path.name for path in (directory / "checkpoints").iterdir()] == ["step-2"]
    assert timeless(directory) == timeless(unbroken)


def test_a_checkpoint_of_another_model_is_refused_and_nothing_is_cut_off(
    unbroken: Path, toy: Path, tmp_path: Path
) -> None:
    other = write_model(tmp_path / "model", hidden_size=16, num_layers=1)
    before = timeless(unbroken)
    with pytest.raises(Refused):
        train(config_of(toy, unbroken, model={"path": other}), resume=True)
    assert timeless(unbroken) == before


def test_a_failing_reward_ends_the_run_with_function_row_and_completion(
    toy: Path, tmp_path: Path, reward_module: dict[str, Any]
) -> None:
    reward_module["reward"] = lambda completions, rows: [float("nan")] * len(rows)
    config = config_of(toy, tmp_path / "run", reward={"function": "reward_of_test:reward"})
    with pytest.raises(RewardError, match="reward_of_test:reward returned no finite number at row 0"):
        train(config)


def test_with_kl_the_reference_stays_where_the_policy_began(toy: Path, tmp_path: Path) -> None:
    train(config_of(toy, tmp_path / "run", loss={"kl_coef": 0.01}, run={"steps": 3, "save_every": 0}))
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert lines[0]["actor/ref_kl"] == pytest.approx(0, abs=1e-6)
    assert lines[1]["actor/ref_kl"] > 1e-6
    assert "time/phase/ref_log_prob" in lines[0]
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_later_mini_batches_and_epochs_are_off_policy(toy: Path, tmp_path: Path) -> None:
    algorithm = {"num_mini_batches": 2, "epochs": 2}
    train(config_of(toy, tmp_path / "run", algorithm=algorithm, run={"steps": 1, "save_every": 0}))
    (line,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert line["actor/approx_kl"] > 1e-6
    assert line["actor/ratio_max"] > 1.001
    assert line["actor/num_tokens"] == 2 * line["response/num_tokens"]


def test_a_run_stops_once_the_reward_is_reached(toy: Path, tmp_path: Path) -> None:
    run = {"stop_at_reward": 0.0, "stop_window": 2, "steps": 50, "save_every": 0}
    result = train(config_of(toy, tmp_path / "run", run=run))
    assert result.step == 2
    assert result.summary().startswith("reward 0.")


@pytest.mark.ci  # the README's loop trains on Ray in the base suite
def test_the_command_joins_a_cluster_and_trains_on_two_workers_as_one_rank_does(
    ray_cluster: None, unbroken: Path, tmp_path: Path
) -> None:
    import ray

    directory = tmp_path / "run"
    command = [sys.executable, "-m", "manymesh.recipes.grpo", "--config", str(unbroken / "config.yaml")]
    command += ["pool.processes=[2]", f"run.dir={directory}", "run.steps=2"]
    env = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    process = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150)
    assert process.returncode == 0, process.stderr
    assert "step 2/2" in process.stdout
    assert "reward 0." in process.stdout
    assert ray.cluster_resources()["CPU"] == 6  # somebody else's cluster: still there
    for ours, theirs in zip(timeless(directory), timeless(unbroken), strict=False):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)


class WritesInTheBackground(ActorRolloutRefWorker):
    """Its last checkpoint gets its name when it is settled, or when the worker ends, which may be too late."""

    waiting: str | None = None

    @register()
    def save_checkpoint(self, path: str, step: int = 0) -> None:
        self.settle_checkpoint()
        super().save_checkpoint(f"{path}.part", step)
        self.waiting = path

    @register()
    def settle_checkpoint(self) -> None:
        if self.waiting is not None:
            os.rename(f"{self.waiting}.part", self.waiting)
            self.waiting = None


def test_the_last_checkpoint_is_whole_when_the_run_ends_though_an_engine_writes_in_the_background(
    toy: Path, tmp_path: Path
) -> None:
    config = config_of(toy, tmp_path / "run", run={"dir": str(tmp_path / "run"), "steps": 1, "save_every": 2})
    trainer = GrpoTrainer(config)
    worker = RayClassWithInitArgs(WritesInTheBackground, Placement(config).worker())
    with LocalWorkerGroup(worker) as group:
        trainer.run(Workers.shared(group), Console(file=sys.stdout, width=200))
        assert [step for step, _ in trainer.directory.checkpoints.complete()] == [1]
