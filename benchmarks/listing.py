"""What listing costs, as whole processes: `python -m benchmarks.listing`.

| case | ours | floor |
|---|---|---|
| list | `python -m core.list_engines`, what is installed | looking the group up with importlib.metadata |
| list-200 | the same with 200 more plugins on the path | the same floor, with them on the path |
| one-of-200 | one of them in full, with its options | the same floor, with them on the path |
| import-core | `import core` | a bare interpreter |

Bytecode is compiled, as it is after a first start: the runs that warm up write it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks._pairs import measure, report
from tests.fake_distributions import BACKEND, install, manifest, plugin

ENTRY_POINTS = "import importlib.metadata; print(importlib.metadata.entry_points(group='manymesh.v1'))"


def main() -> None:
    parser = argparse.ArgumentParser(description="Time listing and importing against their floors.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pairs", type=int, default=15)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        for number in range(200):
            module = f"fake_{number:03}"
            of_plugin = plugin(manifest(module, module, requires=(("pluggy>=1",), ("attrs>=24",)), summary="a fake"))
            sources = {f"{module}.py": of_plugin, f"{module}_backend.py": BACKEND}
            install(site, f"fake-{number:03}", sources)
        listing, floor = ("-m", "core.list_engines"), ("-c", ENTRY_POINTS)
        cases = [
            measure("list", python(*floor), python(*listing), args.pairs),
            measure("list-200", python(*floor, path=site), python(*listing, path=site), args.pairs),
            measure("one-of-200", python(*floor, path=site), python(*listing, "fake_100", path=site), args.pairs),
            measure("import-core", python("-c", "pass"), python("-c", "import core"), args.pairs),
        ]
    report(cases, args.json)


def python(*args: str, path: Path | None = None) -> Callable[[], object]:
    """A run of this interpreter; it raises when the process fails."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    command = [sys.executable, *args]
    return partial(subprocess.run, command, env=env, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
