"""What manymesh lists of this distribution. Imported by every listing, so it imports nothing heavy."""

from __future__ import annotations

from core.hookspecs import hookimpl
from core.manifest import Capability, Manifest


@hookimpl
def manymesh_manifests() -> list[Manifest]:
    return [
        Manifest(
            kind="engine",
            name="template-engine",
            factory="manymesh_template_engine.engine:TemplateEngine",
            config="manymesh_template_engine.config:TemplateEngineConfig",
            planner="manymesh_template_engine.plan:plan",
            capabilities={Capability.CHECKPOINT, Capability.RESHARD},
            requires=(("torch>=2.9",), ("transformers>=5.16",)),
            summary="plain torch: a whole model on every rank, gradients summed over ranks",
        )
    ]
