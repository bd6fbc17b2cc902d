"""`python -m manymesh.recipes.grpo --config FILE [path.to.key=value ...] [--resume]`"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from core.errors import ManymeshError
from manymesh.recipes.yaml_config import load_yaml, override

INTERRUPTED = 130  # what a shell gives for Ctrl-C


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; gives its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m manymesh.recipes.grpo",
        description="Train a language model with GRPO.",
        epilog="The demo trains a tiny model made on the spot: see python -m manymesh.recipes.demo --help.",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML")
    parser.add_argument("overrides", nargs="*", metavar="path.to.key=value", help="values are read as YAML")
    parser.add_argument("--resume", action="store_true", help="go on from the latest complete checkpoint")
    parser.add_argument("--demo", action="store_true", help="the demo; FILE is laid over its config")
    parser.add_argument("--seed", type=int, default=0, help="of the demo")
    parser.add_argument("--verbose", action="store_true", help="errors with their traceback")
    args = parser.parse_intermixed_args(arguments)
    if args.demo and args.resume:
        parser.error("--demo begins a run; one that is there goes on by --config RUN/config.yaml --resume")
    if args.demo:
        from manymesh.recipes.demo import main as demo

        options = ["--verbose"] if args.verbose else []
        options += [f"--config={args.config}"] if args.config else []
        return demo([f"--seed={args.seed}", *options, *args.overrides])
    if args.config is None:
        parser.error("--config FILE or --demo is needed")
    return guarded(lambda: train(args.config, args.overrides, resume=args.resume), verbose=args.verbose)


def train(file: str, overrides: Sequence[str] = (), *, resume: bool = False) -> int:
    """Run what a YAML file says."""
    data = override(load_yaml(file), overrides)
    # Reading the file is quick; what follows imports torch.
    from manymesh.recipes.grpo.config import GrpoConfig
    from manymesh.recipes.grpo.launch import worker_group
    from manymesh.recipes.grpo.trainer import GrpoTrainer

    config = GrpoConfig.of(data)
    trainer = GrpoTrainer(config, resume=resume)
    with worker_group(config) as group:
        outcome = trainer.run(group)
    print(outcome.summary())
    return 0


def guarded(command: Callable[[], int], *, verbose: bool = False) -> int:
    """Run a command; our own errors are printed without Python's traceback and give 1."""
    # Bars for each file that transformers writes or reads, and torch's word on a function it renamed.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    try:
        return command()
    except ManymeshError as error:
        if verbose:
            traceback.print_exc()
        else:
            print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if verbose:
            traceback.print_exc()
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
