"""The suite of training engines."""

from __future__ import annotations

from sdk.conformance.suites.manifest import ManifestSuite
from sdk.conformance.suites.mesh import MeshSuite


class EngineConformance(ManifestSuite, MeshSuite):
    """Whether a backend meets core.protocols.Engine, and does what its manifest offers. See Conformance for what a
    subclass sets."""

    kind = "engine"
