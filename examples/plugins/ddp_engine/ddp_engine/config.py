"""Options of the engine. Imports nothing heavy: listing and planning read this."""

from __future__ import annotations

import attrs

from core.config import EngineConfig


@attrs.frozen
class DdpEngineConfig(EngineConfig):
    """EngineConfig, and what is this engine's own. Users' YAML is structured into it."""

    attn_implementation: str | None = None  # as transformers names it: "sdpa", "eager", ...; None for its choice
    bucket_mb: int = 25  # gradients that are reduced together, while backward goes on, MiB
    find_unused_parameters: bool = False  # for models of which a rank's tokens may leave a part out, such as experts
    gradient_checkpointing: bool = False  # recompute each layer in backward: less memory, more time
