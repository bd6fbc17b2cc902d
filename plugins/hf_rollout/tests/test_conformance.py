"""The contract's suite on this rollout."""

from __future__ import annotations

import pytest

from sdk.conformance import RolloutConformance


class TestHf(RolloutConformance):
    backend = "hf"
    families = ("untied", "tied", "odd vocabulary", "biases", "llama", "experts")
    worlds = (2,)


@pytest.mark.ci
class TestHfInBf16(RolloutConformance):
    backend = "hf"
    worlds = (1,)
    dtype = "bfloat16"
