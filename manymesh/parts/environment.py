"""Environment variables for a while: of what reads the environment as it starts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def environment_of(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables inside; afterwards each is as it was before, or absent."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
