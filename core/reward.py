"""The contract of rewards, for recipes: what a plugin of kind "reward" builds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Reward(Protocol):
    """Scores completions. Its factory is called as `factory(config)`, on the driver or in a worker without a model."""

    def __call__(self, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Sequence[float]:
        """One finite score a completion, in their order.

        Args:
            completions: the texts that the policy wrote.
            rows: for each completion the row of the data set whose prompt led to it.
        """
        ...
