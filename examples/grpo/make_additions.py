"""Write one-digit additions as JSONL, the same ones at every call: `python examples/grpo/make_additions.py`."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path


def additions(num_rows: int, seed: int = 0) -> list[dict[str, str]]:
    """Rows with `prompt`, text for the model to go on with, and `answer`, its digits."""
    draw = random.Random(seed)
    pairs = [(draw.randrange(10), draw.randrange(10)) for _ in range(num_rows)]
    return [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a, b in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write one-digit additions as JSONL.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "additions.jsonl")
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = additions(args.rows, args.seed)
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} additions in {args.out}")


if __name__ == "__main__":
    main()
