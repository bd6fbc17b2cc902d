"""Order between streams of CUDA: a thread's work on a device waits for another thread's without either host waiting.

Each thread has a current stream of its own. A library may make the main thread's another one than the default (vLLM
does), and then nothing orders what the main thread launches and what the link's thread does."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def mark(device: torch.device) -> torch.cuda.Event | None:
    """An event behind all that this thread has launched on the device's current stream; None on CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def follow(event: torch.cuda.Event | None, device: torch.device) -> None:
    """What this thread launches from now on runs after the event."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)


def keep_for_this_stream(tensors: Iterable[torch.Tensor]) -> None:
    """The memory of tensors that another thread's stream allocated is not given away before this one's is done."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
