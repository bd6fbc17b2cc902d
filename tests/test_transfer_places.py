"""Where the ends of a transfer run: what is refused before anything is sent. CUDA's answers are faked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.errors import Refused
from core.group import RayClassWithInitArgs, WorkerGroup
from core.transport.local import LocalWorkerGroup
from manymesh.workers import WeightSync
from manymesh.workers.transfer.places import Place, refuse_shared_devices
from manymesh.workers.transfer.remote import WeightSink, WeightSource, WeightWorker


class End(WeightWorker):
    """Both ends of a transfer, of which only the meeting is tested."""

    def __init__(self, device: str) -> None:
        nothing: Any = None
        self.weight_source = WeightSource(nothing, lambda: 0, device, self.context)
        self.weight_sink = WeightSink(nothing, device, self.context)


def ends(device: str, name: str) -> WorkerGroup:
    return LocalWorkerGroup(RayClassWithInitArgs(End, device), name=name)


def show_gpus(monkeypatch: pytest.MonkeyPatch, uuid: str) -> None:
    """As a process that sees one GPU."""
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "get_device_properties": lambda device: SimpleNamespace(uuid=uuid),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)


def test_nccl_is_refused_where_two_ends_have_one_device() -> None:
    places = [Place("node-1", "GPU-a"), Place("node-1", "GPU-b"), Place("node-1", "GPU-a"), Place("node-2", "GPU-b")]
    with pytest.raises(Refused, match=r"the sender, receiver 2 on GPU GPU-a\n[\s\S]*'ipc'[\s\S]*'object_store'"):
        refuse_shared_devices(places)
    refuse_shared_devices([*places[:2], *places[3:]])
    refuse_shared_devices([Place("node-1")] * 3)  # no GPUs


def test_a_collective_between_groups_that_share_a_gpu_is_refused_when_they_meet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    show_gpus(monkeypatch, "GPU-a")
    sync = WeightSync(ends("cuda", "trainers"), [ends("cuda", "one"), ends("cuda", "two")], timeout_s=10)
    with pytest.raises(Refused, match=r"the sender, receiver 1, receiver 2 on GPU GPU-a") as caught:
        sync.connect()
    assert "from rank 0 of group 'trainers' to one (receiver 1), two (receiver 2)" in caught.value.where
