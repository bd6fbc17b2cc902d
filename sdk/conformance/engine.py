"""The suite of training engines."""

from __future__ import annotations

from sdk.conformance.suites.engine_checkpoint import CheckpointSuite
from sdk.conformance.suites.engine_life import LifeSuite
from sdk.conformance.suites.engine_numbers import NumbersSuite
from sdk.conformance.suites.engine_weights import WeightsSuite
from sdk.conformance.suites.manifest import ManifestSuite


class EngineConformance(ManifestSuite, NumbersSuite, LifeSuite, WeightsSuite, CheckpointSuite):
    """Whether a backend meets core.engine.Engine, and does what its manifest offers. See Conformance and EngineSuite
    for what a subclass sets."""
