"""All faults of engines: see engine_faults."""

from __future__ import annotations

from sdk.conformance import engine_life_faults as engine_life_faults
from sdk.conformance import manifest_faults as manifest_faults
from sdk.conformance.engine_faults import MUTANTS as MUTANTS
