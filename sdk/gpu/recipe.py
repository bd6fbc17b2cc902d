"""Step 13: GRPO in one process, without Ray."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import attrs

from core.registry import EngineRegistry
from core.transport.local import LocalWorkerGroup
from manymesh.recipes.demo import demo_config
from manymesh.recipes.grpo.tracking import TIME
from manymesh.recipes.toy import write_copy_task, write_model
from sdk.gpu.step import StepRun

WINDOW = 5  # steps, of the mean at the beginning and at the end


def grpo(run: StepRun) -> None:
    """The demo's task: the reward rises, and a seed gives the same metrics again."""
    backend = rollout_of(run)
    num_steps = 60 if run.on_cuda else 15
    rewards, _ = train(run, "learns", backend, num_steps)
    first, last = (sum(part) / WINDOW for part in (rewards[:WINDOW], rewards[-WINDOW:]))
    run.figure("reward of the first steps", first, detail=backend)
    run.figure("reward of the last steps", last, detail=f"{num_steps} steps")
    run.check("the reward rises", last > first + (0.2 if run.on_cuda else 0.02))
    with run.part("the same seed again"):
        _, one = train(run, "one", backend, 3)
        _, other = train(run, "other", backend, 3)
        steady = [name for name in one[0] if not name.startswith(TIME)]
        differing = [name for name in steady if [step[name] for step in one] != [step[name] for step in other]]
        run.check("metrics are the same from run to run", not differing, ", ".join(differing))


def rollout_of(run: StepRun) -> str:
    """vLLM where it can be used on a GPU, else transformers' generate."""
    entries = EngineRegistry.default().entries
    usable = {entry.name for entry in entries if entry.kind == "rollout" and entry.status == "ok"}
    return "vllm" if run.on_cuda and "vllm" in usable else "hf"


def train(run: StepRun, name: str, backend: str, num_steps: int) -> tuple[list[float], list[dict[str, Any]]]:
    """Rewards and metrics of all steps."""
    from rich.console import Console

    from manymesh.recipes.grpo.config import GrpoConfig
    from manymesh.recipes.grpo.placement import Placement
    from manymesh.recipes.grpo.trainer import GrpoTrainer
    from manymesh.recipes.grpo.workers import Workers
    from manymesh.workers import ActorRolloutRefWorker

    directory = Path(run.folder, f"grpo-{name}")
    directory.mkdir()
    write_model(directory / "untrained", hidden_size=64 if backend == "hf" else 128)  # vLLM wants heads of 32
    write_copy_task(directory / "copy.jsonl")
    settings = demo_config(directory)
    settings["pool"] = {"processes": [1]}
    settings["rollout"] = {"backend": backend}
    settings["run"] |= {"steps": num_steps, "save_every": 0, "stop_at_reward": None, "export": False}
    config = GrpoConfig.of(settings)
    worker = Placement(config).worker()
    parts = {part: attrs.evolve(getattr(worker, part), device=run.device) for part in ("actor", "rollout")}
    trainer = GrpoTrainer(config)
    with LocalWorkerGroup(ActorRolloutRefWorker, attrs.evolve(worker, **parts)) as group:
        result = trainer.run(Workers.shared(group), Console(file=io.StringIO()))
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return list(result.rewards), [json.loads(line) for line in lines]
