"""Import this before megatron-core: its first import then says nothing of the kernels that this machine lacks.

Which layers are used is the option `layer_spec`'s business, and the engine says so itself.
"""

from __future__ import annotations

import importlib
import warnings

# megatron calls collectives by the names that newer torch deprecates: nothing that a user could mend.
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*")
    for _module in ("optimizer", "distributed", "models.gpt", "dist_checkpointing"):
        importlib.import_module(f"megatron.core.{_module}")
