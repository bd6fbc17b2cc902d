"""What manymesh lists of this distribution, without importing torch."""

from __future__ import annotations

from core.hookspecs import hookimpl
from core.manifest import Capability, Manifest


@hookimpl
def manymesh_manifests() -> list[Manifest]:
    return [
        Manifest(
            kind="rollout",
            name="hf",
            factory="manymesh_hf.rollout:HfRollout",
            config="manymesh_hf.config:HfRolloutConfig",
            planner="manymesh_hf.plan:plan",
            memory="manymesh_hf.memory:memory",
            capabilities={
                Capability.ROW_SEEDS,
                Capability.RELEASE,
                Capability.SCORE,
                Capability.LOG_PROBS_RAW,
                Capability.LOG_PROBS_TEMPERATURE,
                Capability.LOG_PROBS_PROCESSED,
            },
            requires=(("torch>=2.9",), ("transformers>=5.16",)),
            summary="transformers' generate, one full copy of the weights a rank: the embedded default",
        )
    ]
