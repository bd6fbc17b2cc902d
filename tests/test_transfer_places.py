"""Where the ends of a transfer run: what is refused before anything is sent. CUDA's answers are faked."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.errors import Refused
from core.group import RayClassWithInitArgs, WorkerGroup
from core.transport.local import LocalWorkerGroup
from manymesh.workers import WeightSync
from manymesh.workers.transfer.places import Place, refuse_other_variables, refuse_shared_devices
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


def test_ends_with_other_settings_of_nccl_are_refused_by_variable_value_and_end() -> None:
    ours, theirs = {"NCCL_CUMEM_ENABLE": "0", "NCCL_P2P_LEVEL": "SYS"}, {"NCCL_P2P_LEVEL": "PIX"}
    places = [Place("a", "GPU-a", ours), Place("a", "GPU-b", ours), Place("b", "GPU-c", theirs)]
    with pytest.raises(Refused) as caught:
        refuse_other_variables(places)
    assert caught.value.have == (
        "NCCL_CUMEM_ENABLE is '0' at the sender, receiver 1, not set at receiver 2; "
        "NCCL_P2P_LEVEL is 'SYS' at the sender, receiver 1, 'PIX' at receiver 2"
    )
    refuse_other_variables(places[:2])
    many = [Place("a", str(number), {"NCCL_ALGO": "Ring"} if number else {}) for number in range(65)]
    with pytest.raises(Refused, match="receiver 4 and 60 more"):
        refuse_other_variables(many)


def test_an_end_tells_the_settings_that_must_agree_and_not_its_nodes_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("NCCL_")]:
        monkeypatch.delenv(name)
    for name in ("NCCL_NVLS_ENABLE", "NCCL_DEBUG_FILE", "NCCL_SOCKET_IFNAME", "NCCL_TOPO_FILE", "TORCH_NCCL_X"):
        monkeypatch.setenv(name, "1")
    assert Place.here(torch.device("cpu")).nccl == {"NCCL_NVLS_ENABLE": "1"}


def test_groups_with_other_settings_of_nccl_are_refused_when_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two are threads of one process here, so that their places are told."""
    show_gpus(monkeypatch, "GPU-a")
    places = [Place("a", "GPU-a", {"NCCL_NVLS_ENABLE": "0"}), Place("a", "GPU-b")]
    monkeypatch.setattr(Place, "here", lambda device: places.pop())
    sync = WeightSync(ends("cuda", "trainers"), ends("cuda", "rollouts"), timeout_s=10)
    with pytest.raises(Refused, match=r"NCCL_NVLS_ENABLE is .* at the sender"):
        sync.connect()


@pytest.mark.parametrize(("device", "mebibytes"), [("cpu", 256), ("cuda", 1024)])
def test_buckets_are_larger_between_gpus_unless_their_size_is_said(
    device: str, mebibytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    show_gpus(monkeypatch, "GPU-a")
    trainers, rollouts = ends(device, "trainers"), ends(device, "rollouts")
    transport: Any = trainers._transport
    for bucket_mb, size in ((None, mebibytes << 20), (0.5, 1 << 19)):
        options = {"directory": str(tmp_path)}
        with WeightSync(trainers, rollouts, kind="disk", options=options, bucket_mb=bucket_mb, timeout_s=10) as sync:
            sync.connect()
            assert transport._hosts[0].worker.weight_source._sender._bucket_bytes == size
