"""The rollouts' suite: manifest, mesh, rows, sampling, weights, life, ranks and, of what serves, requests."""

from __future__ import annotations

from sdk.conformance.suites.manifest import ManifestSuite
from sdk.conformance.suites.rollout_life import LifeTests
from sdk.conformance.suites.rollout_ranks import RankTests
from sdk.conformance.suites.rollout_rows import RowTests
from sdk.conformance.suites.rollout_sampling import SamplingTests
from sdk.conformance.suites.rollout_serving import ServingTests
from sdk.conformance.suites.rollout_weights import WeightTests


class RolloutConformance(ManifestSuite, RowTests, SamplingTests, WeightTests, ServingTests, LifeTests, RankTests):
    """Any rollout against transformers in one process, on random tiny models of 64 tokens and a context of 512.

    All tests but a few share one engine: one ends an engine of its own, and the ranks have theirs.

    Attributes:
        families: architectures whose weights are updated, see WeightTests; each but "untied" takes an engine of its
            own.
    """
