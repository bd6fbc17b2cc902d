"""All faults of rollouts: see rollout_faults."""

from __future__ import annotations

from sdk.conformance import rollout_row_faults as rollout_row_faults
from sdk.conformance import rollout_serving_faults as rollout_serving_faults
from sdk.conformance import rollout_weight_faults as rollout_weight_faults
from sdk.conformance.rollout_faults import MUTANTS as MUTANTS
