"""`python -m manymesh.recipes.grpo --config FILE [path.to.key=value ...] [--resume]`"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from manymesh.recipes.command import run_guarded
from manymesh.recipes.yaml_config import load_yaml, override


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; gives its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m manymesh.recipes.grpo",
        description="Train a language model with GRPO.",
        epilog="Without a model and data of your own: python -m manymesh.recipes.demo, which takes a FILE as well.",
    )
    parser.add_argument("--config", metavar="FILE", required=True, help="YAML")
    parser.add_argument("overrides", nargs="*", metavar="path.to.key=value", help="values are read as YAML")
    parser.add_argument("--resume", action="store_true", help="go on from the latest complete checkpoint")
    parser.add_argument("--verbose", action="store_true", help="errors with their traceback")
    args = parser.parse_intermixed_args(arguments)
    return run_guarded(lambda: train(args.config, args.overrides, resume=args.resume), verbose=args.verbose)


def train(file: str, overrides: Sequence[str] = (), *, resume: bool = False) -> int:
    """Run what a YAML file says."""
    data = override(load_yaml(file), overrides)
    # Reading the file is quick; what follows imports torch.
    from manymesh.recipes.grpo.config import GrpoConfig
    from manymesh.recipes.grpo.launch import worker_group
    from manymesh.recipes.grpo.trainer import GrpoTrainer

    config = GrpoConfig.of(data)
    trainer = GrpoTrainer(config, resume=resume)
    with worker_group(config) as workers:
        result = trainer.run(workers)
    print(result.summary())
    return 0


if __name__ == "__main__":
    sys.exit(main())
