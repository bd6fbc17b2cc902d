"""The rollouts' suite finds faults, and none in a server that is made of a sound rollout."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from sdk.conformance import RolloutConformance
from tests.sdk.kit import mutants
from tests.sdk.kit.faults import Mutant, OnMutant
from tests.sdk.kit.rollout_server_faults import SOUND

# A few here; all of them in the slow set.
FEW = (
    "gives log-probs one token too early",
    "draws by a row's place in the batch instead of its prompt_id",
    "keeps the KV cache of prompts over an update",
    "loads keys as values",
    "takes an unknown mode of pause for keep",
)


def check(chosen_mutants: Sequence[Mutant], request: pytest.FixtureRequest) -> None:
    results = mutants.run("rollout", "hf", chosen_mutants, request.getfixturevalue("conformance_session"))
    for each in results:
        misses = [name for name in each.mutant.tests if not any(mutants.is_named(test, name) for test in each.failed)]
        assert misses == [], f"a rollout that {each.mutant.name}: found by {list(each.failed)} only"


def test_the_suite_finds_some_faults(request: pytest.FixtureRequest) -> None:
    chosen_mutants = [mutant for mutant in mutants.TARGETS["rollout"].mutants if mutant.name in FEW]
    assert len(chosen_mutants) == len(FEW)
    check(chosen_mutants, request)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_suite_finds_every_fault(request: pytest.FixtureRequest) -> None:
    check(mutants.TARGETS["rollout"].mutants, request)


@pytest.mark.slow
class TestServer(OnMutant, RolloutConformance):
    backend = "hf"
    mutant = SOUND
    worlds = (2,)
    families = ("untied",)
