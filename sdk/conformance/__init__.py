"""The conformance kit: a plugin's tests against the contract, adopted by one subclass. See docs/conformance.md.

    from sdk.conformance import EngineConformance

    class TestMine(EngineConformance):
        backend = "mine"

Light: pytest loads `sdk.conformance.plugin` in every session, so what needs torch is imported when it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sdk.conformance.base import Conformance as Conformance
    from sdk.conformance.dispatch_mode import DispatchModeConformance as DispatchModeConformance
    from sdk.conformance.engine import EngineConformance as EngineConformance
    from sdk.conformance.rollout import RolloutConformance as RolloutConformance

_HOME_OF = {
    "Conformance": "sdk.conformance.base",
    "DispatchModeConformance": "sdk.conformance.dispatch_mode",
    "EngineConformance": "sdk.conformance.engine",
    "RolloutConformance": "sdk.conformance.rollout",
}
__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)
