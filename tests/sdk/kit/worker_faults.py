"""Faults of a rollout that stands in workers on Ray, where a trainer gives it weights: for the suites of colocated
rollouts and of replicas. Most are those of other suites, which these find too."""

from __future__ import annotations

import subprocess
import sys

from sdk.conformance import ColocatedConformance
from tests.sdk.kit.faults import mutant_of
from tests.sdk.kit.rollout_row_faults import ShiftsLogProbs
from tests.sdk.kit.rollout_server_faults import (
    AbortsInPause,
    DrawsAlike,
    HidesAborts,
    NeverPauses,
    RefusesLate,
    SaysFirstVersion,
    ServerFault,
)
from tests.sdk.kit.rollout_weight_faults import IgnoresMinVersion, KeepsVersion, SwapsKeysAndValues

AGREE = "test_policy_and_rollout_agree_after_each_update_and_only_then"
COLOCATED = tuple(
    mutant_of(fault, AGREE) for fault in (ShiftsLogProbs, SwapsKeysAndValues, KeepsVersion, IgnoresMinVersion)
)

SPREAD = "test_requests_are_spread_by_load_and_answers_are_in_their_order"
REFUSED = "test_where_a_request_cannot_be_nothing_of_its_call_runs"
PAUSED = "test_a_pause_holds_all_replicas_and_may_abort"
TRAINED = "test_a_trainers_weights_reach_all_replicas_in_the_midst_of_requests"
DEAD = "test_a_dead_replicas_requests_fail_by_name_the_others_go_on_and_its_processes_end"


class ServesSwapped(SwapsKeysAndValues, ServerFault):
    """loads keys as values"""


class LeavesAProcess(ServerFault):
    """has a process that outlives it when it is killed"""

    def initialize(self) -> None:
        super().initialize()  # type: ignore[misc]
        code = "import sys, time; sys.stdin.read(); time.sleep(120)"  # until its owner is gone, and some time longer
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)


REPLICAS = (
    mutant_of(DrawsAlike, SPREAD),
    mutant_of(HidesAborts, SPREAD),
    mutant_of(RefusesLate, REFUSED),
    mutant_of(NeverPauses, PAUSED),
    mutant_of(AbortsInPause, PAUSED),
    mutant_of(SaysFirstVersion, TRAINED),
    mutant_of(ServesSwapped, TRAINED),
    mutant_of(LeavesAProcess, DEAD),
)


class ColocatedOnTwo(ColocatedConformance):
    worlds = (2,)
