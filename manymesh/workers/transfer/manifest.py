"""The kinds of transfer that manymesh itself lists, without importing torch or Ray."""

from __future__ import annotations

from core.hookspecs import hookimpl
from core.manifest import Manifest

_HERE = "manymesh.workers.transfer"


@hookimpl
def manymesh_manifests() -> list[Manifest]:
    return [
        Manifest(
            kind="transfer",
            name="collective",
            factory=f"{_HERE}.collective:CollectiveTransfer",
            config=f"{_HERE}.config:CollectiveConfig",
            summary="weights by broadcast over a group of trainer and rollout ranks (NCCL, gloo)",
        ),
        Manifest(
            kind="transfer",
            name="ipc",
            factory=f"{_HERE}.ipc:IpcTransfer",
            config=f"{_HERE}.config:IpcConfig",
            summary="weights through memory that the ends on one node share (CUDA IPC, the host's memory)",
        ),
        Manifest(
            kind="transfer",
            name="object_store",
            factory=f"{_HERE}.object_store:ObjectStoreTransfer",
            config=f"{_HERE}.config:ObjectStoreConfig",
            summary="weights through Ray's object store",
        ),
        Manifest(
            kind="transfer",
            name="disk",
            factory=f"{_HERE}.disk:DiskTransfer",
            config=f"{_HERE}.config:DiskConfig",
            requires=(("safetensors>=0.4",),),
            summary="weights as safetensors in a shared directory",
        ),
    ]
