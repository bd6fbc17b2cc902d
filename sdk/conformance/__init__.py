"""The conformance kit: a plugin's tests against the contract, adopted by one subclass. See docs/conformance.md.

    from sdk.conformance import EngineConformance

    class TestMine(EngineConformance):
        backend = "mine"

Light: pytest loads `sdk.conformance.plugin` in every session, so what needs torch is imported when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.lazy import lazy_names

if TYPE_CHECKING:
    from sdk.conformance.base import Conformance as Conformance
    from sdk.conformance.colocated import ColocatedConformance as ColocatedConformance
    from sdk.conformance.dispatch_mode import DispatchModeConformance as DispatchModeConformance
    from sdk.conformance.engine import EngineConformance as EngineConformance
    from sdk.conformance.replicas import ReplicaConformance as ReplicaConformance
    from sdk.conformance.rollout import RolloutConformance as RolloutConformance
    from sdk.conformance.transfer import TransferConformance as TransferConformance
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
