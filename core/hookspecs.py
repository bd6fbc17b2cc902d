"""The hook that a plugin implements, and the marker it marks it with."""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from core.manifest import Manifest

PROJECT = "manymesh"
API_VERSION = 1
ENTRY_POINT_GROUP = f"{PROJECT}.v{API_VERSION}"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def manymesh_manifests() -> Iterable[Manifest]:  # type: ignore[empty-body]
    """Manifests of the backends that this distribution offers. Called while listing: import nothing heavy."""
