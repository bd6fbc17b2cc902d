"""The loop of GRPO on one driver. Read it from GrpoTrainer.run down."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from rich.console import Console

from core.batch import spread_over_response
from core.errors import Refused
from core.model_facts import ModelFacts
from core.rollout import SamplingParams
from manymesh.recipes.grpo.advantage import group_advantages
from manymesh.recipes.grpo.config import GrpoConfig
from manymesh.recipes.grpo.data import PromptData, decode_responses, load_tokenizer
from manymesh.recipes.grpo.metrics import response_metrics, reward_metrics, sample_lines, timing_metrics
from manymesh.recipes.grpo.placement import Placement
from manymesh.recipes.grpo.progress import Phases, Progress
from manymesh.recipes.grpo.reward import Reward
from manymesh.recipes.grpo.run_directory import RunDirectory
from manymesh.recipes.grpo.tracking import Tracker
from manymesh.recipes.grpo.workers import Workers


@attrs.frozen
class RunResult:
    """What came of a run."""

    step: int
    rewards: tuple[float, ...]  # mean of each step, those before a resume included
    seconds: float  # in the loop, since this start
    directory: Path

    def summary(self, window: int = 3) -> str:
        """For people: how the reward went, how long it took, where to look."""
        if not self.rewards:
            return f"no step was run; see {self.directory}"
        last = self.rewards[-window:]
        return (
            f"reward {self.rewards[0]:.2f} -> {sum(last) / len(last):.2f}"
            f" in {self.step} steps, {self.seconds:.1f} s\n"
            f"curve   {self.directory / 'reward.png'}\nmetrics {self.directory / 'metrics.jsonl'}"
        )


class GrpoTrainer:
    """Loads and checks all that needs no worker; `run` trains the workers.

    Args:
        config: of the run.
        resume: go on from the latest complete checkpoint in `run.dir`.

    Raises:
        Refused: see Placement.check; data, tokenizer or reward cannot be loaded; or `run.dir` is in use, or holds a
            run and resume is not asked for.
    """

    def __init__(self, config: GrpoConfig, *, resume: bool = False) -> None:
        self.config, self.resume, self.directory = config, resume, RunDirectory(config)
        if not resume:
            self.directory.check_unused()
        Placement(config).check()
        self.reward = Reward.load(config.reward)
        self.tokenizer = load_tokenizer(config.model.path)
        self.data = PromptData.load(config.data, self.tokenizer)
        self.data.check_fits(ModelFacts.read(config.model.path), config.sampling.max_new_tokens)
        self.phases = Phases()
        self.directory.hold()

    def run(self, workers: Workers, console: Console | None = None) -> RunResult:
        """Train until `run.steps` or `run.stop_at_reward`; saves as it goes, and at the end.

        Raises:
            Refused: the reward failed, the checkpoint is of another model, or the last save failed.
            WorkerFailed: a worker failed. What was tracked and saved so far is there.
        """
        run, console, directory = self.config.run, console or Console(), self.directory
        console.print(
            f"loading {self.config.model.path} on {workers.world_size} workers ...", highlight=False, soft_wrap=True
        )
        workers.init_model()
        if settled := workers.settled_options():
            console.print(f"left to the devices: {settled}", highlight=False, soft_wrap=True)
        step = self._restore(workers)
        workers.sync.sync()
        tracker = Tracker(directory.path, step)
        start, last_save = time.perf_counter(), step if step else -1
        progress = Progress(console, run.steps, self.phases)
        try:
            self._greet(progress, step)
            with progress:
                while step < run.steps and not self._is_solved(tracker.rewards()):
                    metrics, samples = self.step(workers, step)
                    step += 1
                    _attempt(progress, tracker.log, step, metrics, samples)
                    progress.show(step, metrics, tracker.rewards())
                    if run.save_every and step % run.save_every == 0:
                        last_save = step if self._save(workers, step, progress) else last_save
                        _attempt(progress, tracker.draw)
            if run.save_every and last_save != step:
                directory.checkpoints.save(step, partial(workers.trainers.save_checkpoint, step=step))
            if run.save_every:
                workers.trainers.settle_checkpoint()  # while there is time: at shutdown there is little
            if run.export:
                progress.note(f"writing the model to {directory.path / 'model'}")
                workers.trainers.export_model(str(directory.path / "model"))
        except KeyboardInterrupt:
            latest = directory.checkpoints.latest()
            again = f"{sys.executable} -m manymesh.recipes.grpo --config {directory.config_file} --resume"
            progress.note(f"stopped after step {step}; from step {latest[0] if latest else 0} goes on: {again}")
            raise
        finally:
            _attempt(progress, tracker.draw)
            _attempt(progress, tracker.close)
            directory.release()
        return RunResult(step, tuple(tracker.rewards()), time.perf_counter() - start, directory.path)

    def step(self, workers: Workers, step: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """One step of GRPO, counted from 0: its metrics, and some of its samples."""
        config, phase = self.config, self.phases
        phase.seconds.clear()
        start = time.perf_counter()

        with phase("prompts"):
            prompts, row_of = self.data.batch(step, config.algorithm.prompts_per_step)
            sampling = _with_seed(config.sampling, config.run.seed, step)
        with phase("generate"):
            samples = workers.rollouts.generate_sequences(prompts, sampling)
        # The workers score while the driver computes rewards.
        batch = samples.select("input_ids", "response_mask", "rollout_temperature")
        prompt_id, temperature, trainers = samples["prompt_id"], config.sampling.temperature, workers.trainers
        old_log_probs = trainers.compute_log_prob.later(batch, temperature)
        ref_log_probs = trainers.compute_ref_log_prob.later(batch, temperature) if config.uses_ref else None
        with phase("reward"):
            rows = [row_of[number] for number in prompt_id.tolist()]
            completions = decode_responses(samples, self.tokenizer)
            rewards = self.reward(completions, rows)
        with phase("old_log_prob"):
            scores = old_log_probs.result()
            batch["old_log_probs"] = scores["old_log_probs"]
        if ref_log_probs is not None:
            with phase("ref_log_prob"):
                batch["ref_log_probs"] = ref_log_probs.result()["ref_log_probs"]
        with phase("advantage"):
            algorithm, by_row = config.algorithm, torch.tensor(rewards, dtype=torch.float64)
            advantages = group_advantages(by_row, prompt_id, divide_by_std=algorithm.divide_by_std, eps=algorithm.eps)
            batch["advantages"] = spread_over_response(advantages, batch["response_mask"])
        with phase("update"):
            update = trainers.update_actor.later(
                batch, algorithm.num_mini_batches, algorithm.epochs, temperature=temperature
            )
            metrics = reward_metrics(by_row, prompt_id) | response_metrics(samples, scores)
            metrics |= {f"actor/{name}": value for name, value in update.result().items()}
        with phase("sync"):
            workers.sync.sync()
        metrics |= timing_metrics(time.perf_counter() - start, metrics["response/num_tokens"], phase.seconds)
        texts = [row[config.data.prompt] for row in rows]
        return metrics, sample_lines(prompt_id.tolist(), texts, completions, rewards, config.run.num_samples)

    def _restore(self, workers: Workers) -> int:
        """Load the latest checkpoint where there is one and the run is resumed; the step to go on from."""
        latest = self.directory.checkpoints.latest() if self.resume else None
        if latest is None:
            return 0
        step, path = latest
        saved_step = workers.trainers.load_checkpoint(str(path / "actor"))
        if saved_step != step:
            raise Refused(
                "a checkpoint stands under the name of another step", have=saved_step, want=step, where=str(path)
            )
        return step

    def _greet(self, progress: Progress, step: int) -> None:
        """Say what is resumed and what is different now; keep the config beside the results."""
        if self.resume:
            progress.note(f"resumes at step {step}" if step else "no complete checkpoint: starts at step 0")
            for difference in self.directory.differences():
                progress.warn(f"the config differs from that of the run so far: {difference}")
        if self.data.num_dropped:
            progress.note(f"{self.data.num_dropped} prompts are too long and left out")
        _attempt(progress, self.directory.write_config)

    def _save(self, workers: Workers, step: int, progress: Progress) -> bool:
        checkpoints = self.directory.checkpoints
        try:
            checkpoints.save(step, partial(workers.trainers.save_checkpoint, step=step))
        except Refused as error:
            previous = checkpoints.latest()
            good = f"the last good one is {previous[1]}" if previous else "there is none yet"
            progress.warn(f"no checkpoint at step {step}, training goes on; {good}\n{error}")
            return False
        return True

    def _is_solved(self, rewards: Sequence[float]) -> bool:
        target, window = self.config.run.stop_at_reward, self.config.run.stop_window
        return target is not None and len(rewards) >= window and sum(rewards[-window:]) / window >= target


def _with_seed(sampling: SamplingParams, seed: int, step: int) -> SamplingParams:
    """A seed of the step's own, for rollouts that know no prompt_id."""
    entropy = (sampling.seed or 0, seed, step)
    return attrs.evolve(sampling, seed=int(np.random.SeedSequence(entropy).generate_state(1)[0]))


def _attempt(progress: Progress, write: Callable[..., object], *args: Any) -> None:
    """Write something for people to read: a full disk must not end the training."""
    try:
        write(*args)
    except OSError as error:
        progress.warn(f"could not be written: {error}")
