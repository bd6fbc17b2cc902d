"""Whether this is an engine as manymesh means it. `pytest` runs all of it; the score is printed at the end."""

from __future__ import annotations

from sdk.conformance import EngineConformance


class TestDdpEngine(EngineConformance):
    backend = "ddp-engine"
