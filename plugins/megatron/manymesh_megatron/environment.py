"""Variables of the environment that megatron-core wants or sets: there while an engine of this process is."""

from __future__ import annotations

import os

from manymesh_megatron.plan import ENVIRONMENT

# The first are there before CUDA starts where the driver takes them from the plan. megatron sets the others for
# TransformerEngine when it builds a model.
VARIABLES = (*ENVIRONMENT, "NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
_before: dict[str, str | None] = {}  # what they were, while they may be ours


def set_variables() -> None:
    """Set what megatron wants, where the user didn't."""
    if not _before:
        _before.update({name: os.environ.get(name) for name in VARIABLES})
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def restore_variables() -> None:
    """Put back what the variables were before the first engine."""
    for name, value in _before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _before.clear()
