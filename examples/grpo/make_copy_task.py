"""Write the demo's task, with a model of wider heads: `python examples/grpo/make_copy_task.py`."""

from __future__ import annotations

import argparse
from pathlib import Path

from manymesh.recipes.toy import write_copy_task, write_model


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny model that knows nothing, and digits for it to copy.")
    parser.add_argument("--out", type=Path, default=Path("runs/copy-task"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    model = write_model(args.out / "model", seed=args.seed, hidden_size=128)  # four heads of 32
    data = write_copy_task(args.out / "copy.jsonl", seed=args.seed)
    print(f"model in {model}, prompts in {data}")


if __name__ == "__main__":
    main()
