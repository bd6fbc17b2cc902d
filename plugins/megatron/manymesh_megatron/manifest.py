"""What manymesh lists of this distribution, without importing torch or megatron."""

from __future__ import annotations

from core.hookspecs import hookimpl
from core.manifest import Capability, Manifest


@hookimpl
def manymesh_manifests() -> list[Manifest]:
    return [
        Manifest(
            kind="engine",
            name="megatron",
            factory="manymesh_megatron.engine:MegatronEngine",
            config="manymesh_megatron.config:MegatronConfig",
            planner="manymesh_megatron.plan:plan",
            memory="manymesh_megatron.memory:memory",
            model_types={"language_model", "value_model"},
            capabilities={Capability.CHECKPOINT, Capability.RESHARD, Capability.OFFLOAD, Capability.PACKED},
            requires=(("torch>=2.9",), ("transformers>=5.16",), ("megatron-core>=0.16.1,<0.20",)),
            summary="megatron-core: tensor, pipeline, context and expert parallel training of Llama, Qwen2 and Qwen3",
        )
    ]
