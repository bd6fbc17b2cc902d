"""The suite of rollouts in a trainer's own workers."""

from __future__ import annotations

from sdk.conformance.suites.colocated import ColocatedSuite


class ColocatedConformance(ColocatedSuite):
    """A rollout and a trainer on the same ranks, in workers on Ray. See Conformance and WorkerSuite for what a
    subclass sets."""
