"""The contract's suites on this rollout."""

from __future__ import annotations

import pytest

from sdk.conformance import ColocatedConformance, RolloutConformance


class TestHf(RolloutConformance):
    backend = "hf"
    families = ("untied", "tied", "odd vocabulary", "biases", "llama", "experts")
    worlds = (2,)


@pytest.mark.ci
class TestHfInBf16(RolloutConformance):
    backend = "hf"
    worlds = (1,)
    dtype = "bfloat16"


class TestHfColocated(ColocatedConformance):
    backend = "hf"
    worlds = (2,)
