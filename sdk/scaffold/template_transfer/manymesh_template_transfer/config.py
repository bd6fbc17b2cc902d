"""Options of the transfer. Imports nothing heavy: listing reads this."""

from __future__ import annotations

import attrs

from core.errors import ConfigError


@attrs.frozen
class TemplateTransferConfig:
    """What users may say in `transfer.options`."""

    chunk_kb: int = 1024  # KiB that are handed to the socket at a time

    def __attrs_post_init__(self) -> None:
        if self.chunk_kb < 1:
            raise ConfigError("illegal chunk_kb", have=self.chunk_kb, want="at least 1")
