"""Whether this is a rollout as manymesh means it. `pytest` runs all of it; the score is printed at the end."""

from __future__ import annotations

from sdk.conformance import RolloutConformance


class TestTemplateRollout(RolloutConformance):
    backend = "template-rollout"
