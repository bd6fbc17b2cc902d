"""The kit's worlds of ranks, by a shorter name."""

from __future__ import annotations

import pytest

from sdk.conformance.base import Session
from sdk.testing import Worlds


@pytest.fixture(scope="session")
def on(conformance_session: Session) -> Worlds:
    return conformance_session.worlds
