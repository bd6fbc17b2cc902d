"""A run's directory: held by one process at a time, with the config that it ran with and its checkpoints.

What is tracked in it is in tracking.py, what a checkpoint consists of in checkpoints.py.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import attrs
import yaml

from core.errors import Refused
from manymesh.recipes.grpo.checkpoints import Checkpoints
from manymesh.recipes.grpo.config import GrpoConfig
from manymesh.recipes.yaml_config import load_yaml


class RunDirectory:
    """The directory `run.dir` of a config, which need not exist before `hold`."""

    def __init__(self, config: GrpoConfig) -> None:
        self._config = config
        self._lock: IO[str] | None = None
        self.path = Path(config.run.dir).expanduser().absolute()
        self.config_file = self.path / "config.yaml"
        self.checkpoints = Checkpoints(self.path / "checkpoints", config.run.keep_last)

    def check_unused(self) -> None:
        """Raises Refused where it already holds a run."""
        metrics = self.path / "metrics.jsonl"
        if self.checkpoints.latest() or (metrics.exists() and metrics.stat().st_size):
            raise Refused(
                f"{self._config.run.dir!r} already holds a run",
                where="run.dir",
                mend="--resume goes on with it; or give another run.dir",
            )

    def hold(self) -> None:
        """Create it where it is missing, and keep other runs out until `release`, or until this process ends.

        Raises:
            Refused: it cannot be created, or another run holds it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / ".lock").open("a+")
        except OSError as error:
            raise Refused("cannot make the run's directory", have=error, where="run.dir") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            holder = file.read().strip() or "?"
            file.close()
            raise Refused(
                f"another run is writing into {str(self.path)!r}",
                have=f"process {holder}",
                where="run.dir",
                mend="give another run.dir, or wait for it",
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        self._lock = file

    def release(self) -> None:
        """Let other runs in. Can be called twice."""
        if self._lock is not None:
            self._lock.close()

    def differences(self) -> list[str]:
        """What the config changes against that of the run so far, as 'path: old -> new'."""
        return changed(load_yaml(self.config_file), self._plain()) if self.config_file.exists() else []

    def write_config(self) -> None:
        """Keep the config beside the results. Raises OSError."""
        self.config_file.write_text(yaml.safe_dump(self._plain(), sort_keys=False))

    def _plain(self) -> dict[str, Any]:
        """The config as it looks in a file, with paths that are good in any working directory."""
        plain: dict[str, Any] = json.loads(json.dumps(attrs.asdict(self._config)))  # no tuples, no enums
        for section, key in (("model", "path"), ("data", "path"), ("run", "dir")):
            plain[section][key] = str(Path(plain[section][key]).expanduser().absolute())
        return plain


def changed(before: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> list[str]:
    """What differs between two configs, as 'path: old -> new'."""
    out = []
    for key in dict.fromkeys([*before, *now]):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            out += changed(old, new, f"{path}{key}.")
        elif old != new:
            out.append(f"{path}{key}: {old} -> {new}")
    return out
