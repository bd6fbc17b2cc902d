"""What manymesh lists of this distribution. Imported by every listing, so it imports nothing heavy."""

from __future__ import annotations

from core.hookspecs import hookimpl
from core.manifest import Capability, Manifest


@hookimpl
def manymesh_manifests() -> list[Manifest]:
    return [
        Manifest(
            kind="engine",
            name="ddp-engine",
            factory="ddp_engine.engine:DdpEngine",
            config="ddp_engine.config:DdpEngineConfig",
            planner="ddp_engine.plan:plan",
            capabilities={Capability.CHECKPOINT, Capability.RESHARD},
            requires=(("torch>=2.9",), ("transformers>=5.16",)),
            summary="torch's DistributedDataParallel: a whole model on every rank",
        )
    ]
