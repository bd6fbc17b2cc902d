"""What manymesh lists of this distribution. Imported by every listing, so it imports nothing heavy."""

from __future__ import annotations

from core.hookspecs import hookimpl
from core.manifest import Capability, Manifest


@hookimpl
def manymesh_manifests() -> list[Manifest]:
    return [
        Manifest(
            kind="rollout",
            name="template-rollout",
            factory="manymesh_template_rollout.rollout:TemplateRollout",
            config="manymesh_template_rollout.config:TemplateRolloutConfig",
            planner="manymesh_template_rollout.plan:plan",
            capabilities={
                Capability.ROW_SEEDS,
                Capability.RELEASE,
                Capability.LOG_PROBS_RAW,
                Capability.LOG_PROBS_TEMPERATURE,
                Capability.LOG_PROBS_PROCESSED,
            },
            requires=(("torch>=2.9",), ("transformers>=5.16",)),
            summary="plain torch: one token at a time with a cache, a whole model on every rank",
        )
    ]
