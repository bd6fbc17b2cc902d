"""Options of the rollout. Imports nothing heavy."""

from __future__ import annotations

import attrs

from core.config import RolloutConfig
from core.errors import ConfigError


@attrs.frozen
class HfRolloutConfig(RolloutConfig):
    """Rollout with transformers' generate. It has no randomness of its own, so `seed` isn't read: see SamplingParams.

    Attributes:
        attn_implementation: as transformers names it ("eager", "sdpa", "flash_attention_2"); None for its choice.
        max_batch_rows: rows (prompts times samples) that are generated at once; None for all. Bounds the KV cache;
            which tokens are sampled doesn't depend on it.
    """

    attn_implementation: str | None = None
    max_batch_rows: int | None = None

    def __attrs_post_init__(self) -> None:
        if self.max_batch_rows is not None and self.max_batch_rows < 1:
            raise ConfigError(
                "max_batch_rows is a number of rows", have=self.max_batch_rows, want="at least 1, or None for all"
            )
