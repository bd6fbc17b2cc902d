"""For authors of plugins and operators: `python -m sdk new | check | doctor`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core.errors import ManymeshError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 1 where what was looked at is not well, 2 where a request is refused."""
    parser = argparse.ArgumentParser(
        prog="python -m sdk", description="Make, check and look after plugins of manymesh."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    new = commands.add_parser("new", help="make a distribution with a backend that works, to be made your own")
    new.add_argument("name", help="of the distribution, e.g. my-engine; users ask for it without a leading 'manymesh-'")
    new.add_argument("--kind", choices=("engine", "rollout"), default="engine", help="default: engine")
    new.add_argument("--dir", type=Path, metavar="D", help="directory to make; default: the name, here")
    new.set_defaults(run=_new)

    args = parser.parse_args(argv)
    try:
        status: int = args.run(args)
    except ManymeshError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return status


def _new(args: Any) -> int:
    from sdk.scaffold.generate import generate
    from sdk.scaffold.names import Names

    names = Names.of(args.name, args.kind)
    names.check_free()
    directory = args.dir or Path(names.distribution)
    files = generate(names, directory)
    print(f"{names.kind} {names.backend!r} in {directory}: {len(files)} files. What to do with it:\n")
    commands = {
        f"cd {directory}": "",
        "pip install -e '.[dev]'": "",
        f"python -m core.list_engines {names.backend}": "it is there, and these are its options",
        f"python -m sdk check {names.backend}": "what its manifest says is true",
        "pytest": "all of the conformance kit",
    }
    width = max(map(len, commands))
    for command, what in commands.items():
        print(f"  {command.ljust(width)}  # {what}" if what else f"  {command}")
    print(f"\nThen make {names.package}/{names.kind}.py yours. The licence is yours to choose: see README.md.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
