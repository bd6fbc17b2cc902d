"""The loop of GRPO on one driver. Read it from GrpoTrainer.run down."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import attrs
import numpy as np
import torch
import yaml
from rich.console import Console
from tensordict import TensorDict

from core.batch import contiguous, objects
from core.errors import Refused
from core.manifest import ModelFacts
from core.rollout import SamplingParams
from manymesh.recipes.grpo.advantage import group_advantages, spread_over_tokens
from manymesh.recipes.grpo.checkpoints import Checkpoints
from manymesh.recipes.grpo.config import GrpoConfig
from manymesh.recipes.grpo.data import PromptData, load_tokenizer
from manymesh.recipes.grpo.progress import Phases, Progress
from manymesh.recipes.grpo.reward import Reward
from manymesh.recipes.grpo.split import Workers
from manymesh.recipes.grpo.tracking import REWARD, TIME, Tracker
from manymesh.recipes.yaml_config import load_yaml


@attrs.frozen
class Outcome:
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
    """Loads and checks all that needs no worker; `run` trains a group of ActorRolloutRefWorkers, or split ones.

    Args:
        config: of the run.
        resume: go on from the latest complete checkpoint in `run.dir`.

    Raises:
        Refused: see GrpoConfig.check; data, tokenizer or reward cannot be loaded; or `run.dir` holds a run
            and resume is not asked for.
    """

    def __init__(self, config: GrpoConfig, *, resume: bool = False) -> None:
        self.config, self.resume = config, resume
        self.directory = Path(config.run.dir).expanduser().absolute()
        self.checkpoints = Checkpoints(self.directory / "checkpoints", config.run.keep_last)
        metrics = self.directory / "metrics.jsonl"
        if not resume and (self.checkpoints.latest() or (metrics.exists() and metrics.stat().st_size)):
            raise Refused(
                f"{config.run.dir!r} already holds a run",
                where="run.dir",
                mend="--resume goes on with it; or give another run.dir",
            )
        config.check()
        self.reward = Reward.load(config.reward)
        self.tokenizer = load_tokenizer(config.model.path)
        self.data = PromptData.load(config.data, self.tokenizer)
        self.data.check_fits(ModelFacts.read(config.model.path), config.sampling.max_new_tokens)
        self.version = 0  # of the rollout's weights
        self.phases = Phases()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Refused("cannot make the run's directory", have=error, where="run.dir") from error
        self._lock = _locked(self.directory)

    def run(self, group: Workers, console: Console | None = None) -> Outcome:
        """Train until `run.steps` or `run.stop_at_reward`; saves as it goes, and at the end.

        Raises:
            Refused: the reward failed, the checkpoint is of another model, or the last save failed.
            WorkerFailed: a worker failed. What was tracked and saved so far is there.
        """
        run, console = self.config.run, console or Console()
        console.print(
            f"loading {self.config.model.path} on {group.world_size} workers ...", highlight=False, soft_wrap=True
        )
        group.init_model()
        step = self._restore(group)
        self.version = group.update_weights()
        tracker = Tracker(self.directory, step)
        start, saved = time.perf_counter(), step if step else -1
        progress = Progress(console, run.steps, self.phases)
        try:
            self._greet(progress, step)
            with progress:
                while step < run.steps and not self._solved(tracker.rewards()):
                    metrics, samples = self.step(group, step)
                    step += 1
                    _attempt(progress, tracker.log, step, metrics, samples)
                    progress.show(step, metrics, tracker.rewards())
                    if run.save_every and step % run.save_every == 0:
                        saved = step if self._save(group, step, progress) else saved
                        _attempt(progress, tracker.draw)
            if run.save_every and saved != step:
                self.checkpoints.save(step, partial(group.save_checkpoint, step=step))
            if run.export:
                progress.note(f"writing the model to {self.directory / 'model'}")
                group.export_model(str(self.directory / "model"))
        except KeyboardInterrupt:
            latest = self.checkpoints.latest()
            again = f"{sys.executable} -m manymesh.recipes.grpo --config {self.directory / 'config.yaml'} --resume"
            progress.note(f"stopped after step {step}; from step {latest[0] if latest else 0} goes on: {again}")
            raise
        finally:
            _attempt(progress, tracker.draw)
            _attempt(progress, tracker.close)
            self._lock.close()
        return Outcome(step, tuple(tracker.rewards()), time.perf_counter() - start, self.directory)

    def step(self, group: Workers, step: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """One step of GRPO, counted from 0: its metrics, and some of its samples."""
        config, phase = self.config, self.phases
        phase.seconds.clear()
        start = time.perf_counter()

        with phase("prompts"):
            prompts, rows = self.data.batch(step, config.algorithm.prompts_per_step)
            rows = [row for row in rows for _ in range(config.sampling.num_samples)]
            sampling = _seeded(config.sampling, config.run.seed, step)
        with phase("generate"):
            sampled = group.generate_sequences(prompts, sampling, min_version=self.version)
        with phase("reward"):
            completions = decode_responses(sampled, self.tokenizer)
            rewards = self.reward(completions, rows)

        batch = sampled.select("input_ids", "response_mask")
        temperature = config.sampling.temperature
        with phase("old_log_prob"):
            scored = group.compute_log_prob(batch, temperature)
            batch["old_log_probs"] = scored["old_log_probs"]
        if config.uses_ref:
            with phase("ref_log_prob"):
                reference = group.compute_ref_log_prob(batch.select("input_ids", "response_mask"), temperature)
                batch["ref_log_probs"] = reference["ref_log_probs"]
        with phase("advantage"):
            by_row = group_advantages(
                torch.tensor(rewards),
                torch.arange(config.algorithm.prompts_per_step).repeat_interleave(config.sampling.num_samples),
                divide_by_std=config.algorithm.divide_by_std,
                eps=config.algorithm.eps,
            )
            batch["advantages"] = spread_over_tokens(by_row, batch)
        with phase("update"):
            trained: dict[str, float] = group.update_actor(
                batch, config.algorithm.num_mini_batches, config.algorithm.epochs, temperature=temperature
            )
        with phase("sync"):
            self.version = group.update_weights()

        metrics = reward_metrics(rewards, config.sampling.num_samples) | response_metrics(sampled, scored)
        metrics |= {f"actor/{name}": value for name, value in trained.items()}
        metrics |= self._timing(time.perf_counter() - start, metrics)
        stride = config.sampling.num_samples
        samples = [
            {"prompt": row[config.data.prompt], "completion": completion, "reward": reward}
            for row, completion, reward in zip(rows[::stride], completions[::stride], rewards[::stride], strict=True)
        ]
        return metrics, samples[: config.run.num_samples]

    def _restore(self, group: Workers) -> int:
        """Load the latest checkpoint where there is one and it is asked for; the step to go on from."""
        latest = self.checkpoints.latest() if self.resume else None
        if latest is None:
            return 0
        step, path = latest
        found = group.load_checkpoint(str(path / "actor"))
        if found != step:
            raise Refused("a checkpoint stands under the name of another step", have=found, want=step, where=str(path))
        return step

    def _greet(self, progress: Progress, step: int) -> None:
        """Say what is resumed and what is different now; keep the config beside the results."""
        file = self.directory / "config.yaml"
        now = json.loads(json.dumps(attrs.asdict(self.config)))  # tuples and enums as they look in a file
        for section, key in (("model", "path"), ("data", "path"), ("run", "dir")):  # good in any working directory
            now[section][key] = str(Path(now[section][key]).expanduser().absolute())
        if self.resume:
            before = load_yaml(file) if file.exists() else now
            progress.note(f"resumes at step {step}" if step else "no complete checkpoint: starts at step 0")
            for path in changed(before, now):
                progress.warn(f"the config differs from that of the run so far: {path}")
        if self.data.num_dropped:
            progress.note(f"{self.data.num_dropped} prompts are too long and left out")
        _attempt(progress, file.write_text, yaml.safe_dump(now, sort_keys=False))

    def _save(self, group: Workers, step: int, progress: Progress) -> bool:
        try:
            self.checkpoints.save(step, partial(group.save_checkpoint, step=step))
        except Refused as error:
            kept = self.checkpoints.latest()
            good = f"the last good one is {kept[1]}" if kept else "there is none yet"
            progress.warn(f"no checkpoint at step {step}, training goes on; {good}\n{error}")
            return False
        return True

    def _solved(self, rewards: Sequence[float]) -> bool:
        target, window = self.config.run.stop_at_reward, self.config.run.stop_window
        return target is not None and len(rewards) >= window and sum(rewards[-window:]) / window >= target

    def _timing(self, seconds: float, metrics: Mapping[str, float]) -> dict[str, float]:
        phases = {f"{TIME}phase/{name}": spent for name, spent in self.phases.seconds.items()}
        speed = metrics["response/num_tokens"] / seconds
        return {f"{TIME}step": seconds, f"{TIME}tokens_per_second": speed, **phases}


def decode_responses(batch: TensorDict, tokenizer: Any) -> list[str]:
    """The text of every row's response tokens, without special tokens."""
    mask = contiguous(batch["response_mask"])
    input_ids: Any = contiguous(batch["input_ids"])
    # Jagged sums are slow; a running count read off at the rows' ends is not.
    count = torch.nn.functional.pad(mask.values().cumsum(0), (1, 0))
    ends = count[input_ids.offsets()].tolist()
    tokens = input_ids.values()[mask.values()].tolist()
    texts: list[str] = tokenizer.batch_decode(
        [tokens[a:b] for a, b in itertools.pairwise(ends)], skip_special_tokens=True
    )
    return texts


def reward_metrics(rewards: Sequence[float], num_samples: int) -> dict[str, float]:
    """Statistics of a step's rewards, prompt-major."""
    values = np.asarray(rewards)
    groups = values.reshape(-1, num_samples)
    return {
        REWARD: float(values.mean()),
        "reward/std": float(values.std()),
        "reward/min": float(values.min()),
        "reward/max": float(values.max()),
        # Prompts whose samples all got the same: nothing is learnt from them.
        "reward/flat_prompts": float((groups == groups[:, :1]).all(1).mean()),
    }


def response_metrics(sampled: TensorDict, scored: TensorDict) -> dict[str, float]:
    """Lengths, and the trainer's view of what the rollout sampled: entropy, and the gap between their log-
    probs."""
    mask = contiguous(sampled["response_mask"]).values()
    num_tokens = int(mask.sum())
    rows = len(sampled)
    gap = contiguous(sampled["rollout_log_probs"]).values() - contiguous(scored["old_log_probs"]).values()
    gap = gap[mask].abs()
    reasons = objects(sampled.get("finish_reason"))
    return {
        "actor/entropy": float(contiguous(scored["entropy"]).values()[mask].mean()),
        "rollout/log_prob_gap_mean": float(gap.mean()),
        "rollout/log_prob_gap_max": float(gap.max()),
        "response/length_mean": num_tokens / rows,
        "response/num_tokens": num_tokens,
        "response/truncated": reasons.count("length") / rows,
    }


def changed(before: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> list[str]:
    """What differs between two configs, as 'path: old -> new'."""
    out = []
    for key in dict.fromkeys([*before, *now]):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            out += changed(old, new, f"{path}{key}.")
        elif old != new:
            out.append(f"{path}{key}: {old} -> {new}")
    return out


def _locked(directory: Path) -> IO[str]:
    """Hold the run's directory as long as this process lives, or the file is open.

    Raises:
        Refused: another run holds it.
    """
    file = (directory / ".lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        holder = file.read().strip() or "?"
        file.close()
        raise Refused(
            f"another run is writing into {str(directory)!r}",
            have=f"process {holder}",
            where="run.dir",
            mend="give another run.dir, or wait for it",
        ) from error
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def _seeded(sampling: SamplingParams, seed: int, step: int) -> SamplingParams:
    """A seed of the step's own, for rollouts that know no prompt_id."""
    entropy = (sampling.seed or 0, seed, step)
    return attrs.evolve(sampling, seed=int(np.random.SeedSequence(entropy).generate_state(1)[0]))


def _attempt(progress: Progress, write: Callable[..., object], *args: Any) -> None:
    """Write something for people to read: a full disk must not end the training."""
    try:
        write(*args)
    except OSError as error:
        progress.warn(f"could not be written: {error}")
