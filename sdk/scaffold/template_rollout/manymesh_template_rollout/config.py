"""Options of the rollout. Imports nothing heavy: listing and planning read this."""

from __future__ import annotations

import attrs

from core.config import RolloutConfig


@attrs.frozen
class TemplateRolloutConfig(RolloutConfig):
    """RolloutConfig, and what is this rollout's own. Users' YAML is structured into it."""

    attn_implementation: str | None = None  # as transformers names it: "sdpa", "eager", ...; None for its choice
