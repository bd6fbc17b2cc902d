"""See the package."""

from __future__ import annotations

from typing import Any

from sgl_kernel import absent


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    return absent(f"sgl_kernel.mamba.{name}")
