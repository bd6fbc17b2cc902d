"""Worlds of two and four ranks, started when a test asks for one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from sdk.testing import Worlds


@pytest.fixture(scope="session")
def on() -> Iterator[Worlds]:
    with closing(Worlds()) as worlds:
        yield worlds
