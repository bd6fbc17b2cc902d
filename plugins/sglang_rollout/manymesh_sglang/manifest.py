"""What manymesh lists of this distribution, without importing torch."""

from __future__ import annotations

from core.hookspecs import hookimpl
from core.manifest import Capability, Manifest

# Not RELEASE: a manifest speaks for all its devices, and SGLang frees nothing on CPU.
CAPABILITIES = {
    Capability.ROW_SEEDS,
    Capability.SCORE,
    Capability.LOG_PROBS_RAW,
    Capability.LOG_PROBS_TEMPERATURE,
    Capability.LOG_PROBS_PROCESSED,
}
REQUIRES = (("sglang>=0.5.23",),)


@hookimpl
def manymesh_manifests() -> list[Manifest]:
    return [
        Manifest(
            kind="rollout",
            name="sglang",
            factory="manymesh_sglang.local_rollout:SglangRollout",
            config="manymesh_sglang.config:SglangRolloutConfig",
            planner="manymesh_sglang.plan:plan",
            memory="manymesh_sglang.memory:memory",
            capabilities=CAPABILITIES,
            requires=REQUIRES,
            summary="SGLang's Engine in the workers' own processes, one a rank",
        ),
        Manifest(
            kind="rollout",
            name="sglang_server",
            factory="manymesh_sglang.server_rollout:SglangServerRollout",
            config="manymesh_sglang.config:SglangServerConfig",
            planner="manymesh_sglang.plan:server_plan",
            memory="manymesh_sglang.memory:memory",
            capabilities=CAPABILITIES | {Capability.SERVER},
            requires=REQUIRES,
            summary="an SGLang HTTP server beside each rank, or somebody else's; serves in the midst of weight updates",
        ),
    ]
