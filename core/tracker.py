"""The contract of trackers, for recipes: what a plugin of kind "tracker" builds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol


class Tracker(Protocol):
    """Records a run, on the driver. Its factory is called as `factory(config)`."""

    def start(self, directory: Path, run: Mapping[str, Any], step: int) -> None:
        """Begin, or go on with a run after `step` steps: what was recorded of later steps no longer counts.

        Args:
            directory: of the run.
            run: the run's config as plain data.
        """
        ...

    def log(self, step: int, metrics: Mapping[str, float], samples: Sequence[Mapping[str, Any]] = ()) -> None:
        """Record a step: its metrics, and some completions with their rewards."""
        ...

    def close(self) -> None:
        """Write what is still in memory. Nothing is logged afterwards."""
        ...
