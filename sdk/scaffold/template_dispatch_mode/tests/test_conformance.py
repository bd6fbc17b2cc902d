"""Whether this is a dispatch mode as manymesh means it. `pytest` runs all of it; the score is printed at the end."""

from __future__ import annotations

from sdk.conformance import DispatchModeConformance


class TestTemplateDispatchMode(DispatchModeConformance):
    backend = "template-dispatch-mode"
