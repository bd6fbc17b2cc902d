"""What manymesh lists of this distribution, without importing torch."""

from __future__ import annotations

from core.hookspecs import hookimpl
from core.manifest import Capability, Manifest


@hookimpl
def manymesh_manifests() -> list[Manifest]:
    return [
        Manifest(
            kind="engine",
            name="fsdp",
            factory="manymesh_fsdp.engine:FsdpEngine",
            config="manymesh_fsdp.config:FsdpConfig",
            planner="manymesh_fsdp.plan:plan",
            memory="manymesh_fsdp.memory:memory",
            capabilities={Capability.CHECKPOINT, Capability.RESHARD, Capability.OFFLOAD, Capability.PACKED},
            requires=(("torch>=2.9",), ("transformers>=5.16",)),
            summary="PyTorch FSDP2 (fully_shard) on any Hugging Face causal LM",
        )
    ]
