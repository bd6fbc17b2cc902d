"""The contract of environments, for recipes with agents: what a plugin of kind "environment" builds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import attrs


@attrs.frozen
class Episode:
    """How one episode went. The tokens that were sampled in it are recorded by the client, not here."""

    reward: float
    metrics: Mapping[str, float] = attrs.field(factory=dict)


class Environment(Protocol):
    """A task of one turn or of many. Its factory is called as `factory(config)`; one instance runs many episodes at a
    time, on one event loop."""

    async def run(self, client: Any, row: Mapping[str, Any]) -> Episode:
        """Play one episode.

        Args:
            client: an OpenAI client (`openai.AsyncOpenAI`) whose completions the policy samples.
            row: the row of the data set that the episode is about.
        """
        ...
