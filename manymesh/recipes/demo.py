"""`python -m manymesh.recipes.demo`: a tiny model learns to copy four digits on two Ray workers, in a minute or two.

Model, tokenizer and data are made on the spot. Training by FSDP and sampling by transformers run in the same
processes; `--config FILE` lays other settings over the demo's, such as another backend's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manymesh.recipes.command import run_guarded
from manymesh.recipes.yaml_config import laid_over, load_yaml, override


def demo_config(directory: Path, seed: int = 0) -> dict[str, Any]:
    """The demo's config, with model and data under `directory`."""
    return {
        "model": {"path": str(directory / "untrained")},  # "model" is the trained one
        "data": {"path": str(directory / "copy.jsonl"), "seed": seed},
        "reward": {"function": "manymesh.recipes.grpo.reward:digit_share"},
        "pool": {"processes": [2], "use_gpu": False},
        "actor": {"backend": "fsdp", "engine": {"optimizer": {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.0}}},
        "rollout": {"backend": "hf"},
        "sampling": {"num_samples": 16, "max_new_tokens": 4},
        "algorithm": {"prompts_per_step": 32},
        # Without the bonus, one seed in five grows certain of wrong digits, and then learns nothing from its samples.
        "loss": {"clip_low": 0.2, "clip_high": 0.28, "entropy_coef": 0.05},
        "run": {"dir": str(directory), "steps": 250, "seed": seed, "save_every": 20, "stop_at_reward": 0.91},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; gives its exit code."""
    parser = argparse.ArgumentParser(prog="python -m manymesh.recipes.demo", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the model's weights, the data and the sampling")
    parser.add_argument("--dir", type=Path, help="where to; runs/demo-<time> when not given")
    parser.add_argument("--config", metavar="FILE", help="YAML whose values take the place of the demo's")
    parser.add_argument("overrides", nargs="*", metavar="path.to.key=value", help="of the config")
    parser.add_argument("--verbose", action="store_true", help="errors with their traceback")
    args = parser.parse_intermixed_args(arguments)
    directory = args.dir or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")

    def demo() -> int:
        settings = load_yaml(args.config) if args.config else {}
        return run(directory, args.seed, settings, args.overrides)

    return run_guarded(demo, verbose=args.verbose)


def run(directory: Path, seed: int, settings: Mapping[str, Any], overrides: Sequence[str]) -> int:
    """Make the toy, train, and say how it went.

    Args:
        settings: laid over the demo's config, and `overrides` over both.
    """
    from manymesh.recipes.grpo.config import GrpoConfig
    from manymesh.recipes.grpo.launch import worker_group
    from manymesh.recipes.grpo.trainer import GrpoTrainer
    from manymesh.recipes.toy import write_copy_task, write_model

    start = time.perf_counter()
    config = GrpoConfig.of(override(laid_over(demo_config(directory, seed), settings), overrides))
    directory.mkdir(parents=True, exist_ok=True)
    write_model(directory / "untrained", seed=seed)
    write_copy_task(directory / "copy.jsonl", seed=seed)
    rows = config.algorithm.prompts_per_step * config.sampling.num_samples
    print(
        f"A tiny language model, made just now, is to learn to copy four digits: {rows} answers a step, until the"
        f" mean reward of {config.run.stop_window} steps is {config.run.stop_at_reward}.\n"
        f"Starting Ray and {config.world_size} workers ...",
        flush=True,
    )
    trainer = GrpoTrainer(config)
    with worker_group(config) as workers:
        result = trainer.run(workers)
    print(result.summary())
    print(f"all in all {time.perf_counter() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
