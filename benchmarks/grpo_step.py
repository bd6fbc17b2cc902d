"""One GRPO step of the demo against a plain loop of the same arithmetic: `python -m benchmarks.grpo_step`.

| case | ours | floor |
|---|---|---|
| grpo-step | GrpoTrainer.step, two Ray workers, FSDP2 and transformers | benchmarks/_plain_grpo.py, two processes |

The tiny model shows overhead most: dispatch, planning and checks, whose cost doesn't grow with the model.
Where a step's time goes is printed below the table (medians, ms).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

from benchmarks import _plain_grpo
from benchmarks._pairs import measure, report


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a GRPO step against a plain loop.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pairs", type=int, default=25)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    from manymesh.recipes.demo import demo_config
    from manymesh.recipes.grpo.config import GrpoConfig
    from manymesh.recipes.grpo.launch import worker_group
    from manymesh.recipes.grpo.trainer import GrpoTrainer
    from manymesh.recipes.toy import write_copy_task, write_model
    from sdk.testing import RankPool

    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        model, data = write_model(directory / "untrained"), write_copy_task(directory / "copy.jsonl")
        config = GrpoConfig.of(demo_config(directory))
        prompts, samples = config.algorithm.prompts_per_step, config.sampling.num_samples
        trainer = GrpoTrainer(config)
        phases: dict[str, list[float]] = defaultdict(list)
        number = 0
        with RankPool(config.pool.world_size) as ranks, worker_group(config) as workers:
            ranks.run(_plain_grpo.setup, model, data)
            workers.init_model()
            workers.sync.sync()

            def ours() -> None:
                nonlocal number
                trainer.step(workers, number)
                number += 1
                for phase, seconds in trainer.phases.seconds.items():
                    phases[phase].append(1e3 * seconds)

            def floor() -> None:
                ranks.run(_plain_grpo.step, prompts, samples)

            for _ in range(3):  # first steps compile kernels and grow pools
                ours()
                floor()
            phases.clear()
            case = measure("grpo-step", floor, ours, args.pairs)
    report([case], args.json)
    if not args.json:
        print("ours by phase:", ", ".join(f"{phase} {median(times):.1f}" for phase, times in phases.items()))


if __name__ == "__main__":
    main()
