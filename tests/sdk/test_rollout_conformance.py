"""The rollouts' suite finds faults, and none in a server that is made of a sound rollout."""

from __future__ import annotations

import pytest

from sdk.conformance import RolloutConformance
from sdk.conformance.base import Session
from tests.sdk.kit import mutants
from tests.sdk.kit.faults import OnMutant
from tests.sdk.kit.rollout_server_faults import SOUND

# A few here; all of them in the slow set.
FEW = (
    "gives log-probs one token too early",
    "draws by a row's place in the batch instead of its prompt_id",
    "keeps the KV cache of prompts over an update",
    "loads keys as values",
    "takes an unknown mode of pause for keep",
)


def test_the_suite_finds_some_faults(conformance_session: Session) -> None:
    assert mutants.find_misses("rollout", conformance_session, only=FEW) == {}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_suite_finds_every_fault(conformance_session: Session) -> None:
    assert mutants.find_misses("rollout", conformance_session) == {}


@pytest.mark.slow
class TestServer(OnMutant, RolloutConformance):
    backend = "hf"
    mutant = SOUND
    worlds = (2,)
    families = ("untied",)
