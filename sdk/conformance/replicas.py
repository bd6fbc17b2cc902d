"""The suite of replicas of a rollout that serves."""

from __future__ import annotations

from sdk.conformance.suites.replicas import ReplicaSuite


class ReplicaConformance(ReplicaSuite):
    """Two replicas behind one client, and a trainer, in workers on Ray; models with a context of 1024. See Conformance,
    WorkerSuite and ReplicaSuite for what a subclass sets; `worlds` has no meaning here."""
