"""The rollouts' suite: manifest, mesh, rows, sampling, scores, weights, life, ranks and, of what serves, requests."""

from __future__ import annotations

from sdk.conformance.suites.manifest import ManifestSuite
from sdk.conformance.suites.rollout_life import LifeSuite
from sdk.conformance.suites.rollout_ranks import RankSuite
from sdk.conformance.suites.rollout_rows import RowSuite
from sdk.conformance.suites.rollout_sampling import SamplingSuite
from sdk.conformance.suites.rollout_scoring import ScoreSuite
from sdk.conformance.suites.rollout_server import ServerSuite
from sdk.conformance.suites.rollout_states import StateSuite
from sdk.conformance.suites.rollout_weights import UpdateSuite


class RolloutConformance(
    LifeSuite, ServerSuite, StateSuite, UpdateSuite, ScoreSuite, SamplingSuite, RowSuite, RankSuite, ManifestSuite
):
    """Any rollout against transformers in one process, on random tiny models of 64 tokens and a context of 512.

    All tests share one engine, but for those on several ranks. pytest runs the last of the bases first, so the test
    that ends the engine comes last; it may come earlier.

    Attributes:
        families: architectures whose weights are updated, see UpdateSuite; each but "untied" takes an engine of its
            own.
    """
