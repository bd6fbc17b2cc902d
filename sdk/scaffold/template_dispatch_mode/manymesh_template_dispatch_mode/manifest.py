"""What manymesh lists of this distribution. Imported by every listing, so it imports nothing heavy."""

from __future__ import annotations

from core.hookspecs import hookimpl
from core.manifest import Manifest


@hookimpl
def manymesh_manifests() -> list[Manifest]:
    return [
        Manifest(
            kind="dispatch_mode",
            name="template-dispatch-mode",
            factory="manymesh_template_dispatch_mode.dispatch_mode:MODE",
            requires=(("torch>=2.9",),),
            summary="rows are dealt to the ranks like cards, and come back in the caller's order",
        )
    ]
