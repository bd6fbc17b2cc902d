"""Names of weights in messages."""

from __future__ import annotations

from collections.abc import Iterable


def some(names: Iterable[str], limit: int = 20) -> str:
    """The first names of a long list, and how many more there are."""
    texts = list(names)
    more = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return f"[{', '.join(texts[:limit])}]{more}"
