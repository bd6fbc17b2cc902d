"""Workers in an environment of their own: its interpreter is looked at before Ray is asked to start it, and so are
the variables that a user gives it."""

from __future__ import annotations

import functools
import inspect
import json
import os
import subprocess
from collections.abc import Mapping

from core.device import HIDING
from core.errors import Refused
from core.worker import WorkerContext

# How many parts of each version must be the same on both sides: of Python two, for bytecode; of numpy one, whose arrays
# cross; of the others all: Ray's processes speak a language of their version, and manymesh's classes cross.
MUST_MATCH = {"python": 2, "ray": 9, "manymesh": 9, "numpy": 1}


@functools.cache  # what raises is asked again: the user may have mended it
def checked_python(python: str, timeout_s: float = 60.0) -> str:
    """The interpreter of another environment, as an absolute path, once it is known that workers can run there.

    Ray asks nothing: in an environment without ray, or with another, its workers never come up, without an error.

    Raises:
        Refused: it doesn't run, or a version differs that must not.
    """
    path = os.path.abspath(os.path.expanduser(python))  # not resolved: a link is what makes an interpreter a venv's
    ours, theirs = _versions(list(MUST_MATCH)), _ask(path, timeout_s)
    wrong = [name for name, parts in MUST_MATCH.items() if _start(theirs[name], parts) != _start(ours[name], parts)]
    if wrong:
        python_first = f"make the environment with Python {_start(ours['python'], 2)}"
        pins = " ".join(f"{name}=={ours[name]}" for name in wrong)
        raise Refused(
            f"workers cannot run in the environment of {path}",
            have=", ".join(f"{name} {theirs[name] or 'not installed'}" for name in wrong),
            want=", ".join(f"{name} {_start(ours[name], MUST_MATCH[name])}" for name in wrong) + ", as the driver has",
            mend=python_first if "python" in wrong else f"{path} -m pip install {pins}",
        )
    return path


def _ask(path: str, timeout_s: float) -> dict[str, str | None]:
    tell = f"import json\nprint(json.dumps(_versions({list(MUST_MATCH)})))"
    script = f"from __future__ import annotations\n{inspect.getsource(_versions)}\n{tell}"
    try:
        process = subprocess.run([path, "-c", script], capture_output=True, text=True, timeout=timeout_s, check=True)
        versions: dict[str, str | None] = json.loads(process.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise Refused(
            f"{path} is no Python that workers can run on",
            have=getattr(error, "stderr", None) or error,
            mend="give the interpreter of an environment, such as path/to/venv/bin/python, which every node has",
        ) from error
    return versions


def _versions(names: list[str]) -> dict[str, str | None]:
    """Of an environment's Python and distributions. The source runs by itself in the other interpreter."""
    import sys
    from importlib.metadata import PackageNotFoundError, version

    versions: dict[str, str | None] = {}
    for name in names:
        try:
            versions[name] = "{}.{}.{}".format(*sys.version_info) if name == "python" else version(name)
        except PackageNotFoundError:
            versions[name] = None
    return versions


def _start(version: str | None, parts: int) -> str | None:
    return version and ".".join(version.split(".")[:parts])


# By these Ray leaves a process's variables alone, so that it sees all accelerators of its node.
LEAVE_VISIBLE = {f"RAY_EXPERIMENTAL_NOSET_{name}": "1" for name in (*HIDING, "ROCR_VISIBLE_DEVICES")}
PROTECTED = frozenset({*WorkerContext().environment(), *HIDING, "ROCR_VISIBLE_DEVICES", *LEAVE_VISIBLE})


def checked_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that a user may give to workers' processes.

    Raises:
        Refused: some are the group's own, which say each process its place and its devices.
    """
    if wrong := sorted(PROTECTED & env.keys()):
        raise Refused(
            f"the environment of workers sets {', '.join(wrong)}, which the group sets",
            have={name: env[name] for name in wrong},
            want=f"variables other than {', '.join(sorted(PROTECTED))}",
            mend="leave them out; all_devices_visible=True shows each process all of its node's accelerators",
        )
    return dict(env)
