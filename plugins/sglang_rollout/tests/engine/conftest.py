"""SGLang's processes on a small machine, and models for tests beside the suite's."""

from __future__ import annotations

import os
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", PYTHONWARNINGS="ignore")

import pytest

from sdk.conformance.suites.rollout_base import Models


@pytest.fixture(scope="session")
def models(conformance_session: Any) -> Models:
    return Models(conformance_session)
