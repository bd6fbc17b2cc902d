"""Options of the engine. Imports nothing heavy: listing and planning read this."""

from __future__ import annotations

import attrs

from core.config import EngineConfig


@attrs.frozen
class TemplateEngineConfig(EngineConfig):
    """EngineConfig, and what is this engine's own. Users' YAML is structured into it."""

    attn_implementation: str | None = None  # as transformers names it: "sdpa", "eager", ...; None for its choice
    gradient_checkpointing: bool = False  # recompute each layer in backward: less memory, more time
