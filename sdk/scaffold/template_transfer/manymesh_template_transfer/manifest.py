"""What manymesh lists of this distribution. Imported by every listing, so it imports nothing heavy."""

from __future__ import annotations

from core.hookspecs import hookimpl
from core.manifest import Manifest


@hookimpl
def manymesh_manifests() -> list[Manifest]:
    return [
        Manifest(
            kind="transfer",
            name="template-transfer",
            factory="manymesh_template_transfer.transfer:TemplateTransfer",
            config="manymesh_template_transfer.config:TemplateTransferConfig",
            requires=(("torch>=2.9",),),
            summary="weights over TCP, from the trainer to each rollout",
        )
    ]
