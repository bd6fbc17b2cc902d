"""The suites of rollouts in workers find faults, and none in replicas that are made of a sound rollout."""

from __future__ import annotations

import pytest

from sdk.conformance import ReplicaConformance
from sdk.conformance.base import Session
from tests.sdk.kit import mutants
from tests.sdk.kit.faults import OnMutant
from tests.sdk.kit.rollout_server_faults import SOUND

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_the_suite_of_colocated_rollouts_finds_a_fault(conformance_session: Session) -> None:
    assert mutants.find_misses("colocated_rollout", conformance_session, only=["loads keys as values"]) == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["colocated_rollout", "replica"])
def test_the_suites_find_every_fault(conformance_session: Session, kind: str) -> None:
    assert mutants.find_misses(kind, conformance_session) == {}


@pytest.mark.ci
class TestServed(OnMutant, ReplicaConformance):
    backend = "hf"
    mutant = SOUND
