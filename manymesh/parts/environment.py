"""Environment variables for a while: of what reads the environment as it starts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def environment_of(values: Mapping[str, str], *, whole: bool = False) -> Iterator[None]:
    """Set variables inside; afterwards each is as it was before, or absent.

    Args:
        whole: what others set or remove inside is undone too.
    """
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in before.keys() | os.environ.keys() if whole else values:
            value = before.get(name)
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
