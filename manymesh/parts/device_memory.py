"""Making room on a device for the other processes that use it."""

from __future__ import annotations

import gc

import torch


def empty_caches(device: torch.device) -> None:
    """Give back to the device what this process holds there and doesn't use: objects in cycles, memory shared with
    processes that have let go of it, and what torch's allocator keeps for later. Nothing on CPU."""
    if device.type == "cpu":
        return
    gc.collect()
    module = torch.get_device_module(device)
    if hasattr(module, "ipc_collect"):  # CUDA's alone
        module.ipc_collect()
    module.empty_cache()
