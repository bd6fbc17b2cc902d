"""The contract's suite on this rollout."""

from __future__ import annotations

from sdk.conformance import RolloutConformance


class TestHf(RolloutConformance):
    backend = "hf"
    families = ("untied", "tied", "odd vocabulary", "biases", "llama", "experts")
    worlds = (2,)
