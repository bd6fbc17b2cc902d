"""Weights in memory that two processes of a node share. On CUDA only what torch is told is tested, with fakes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.errors import Refused
from manymesh.workers.transfer import ipc
from manymesh.workers.transfer.channel import Channel
from manymesh.workers.transfer.config import IpcConfig
from manymesh.workers.transfer.ipc import IpcTransfer
from manymesh.workers.transfer.places import Place, refuse_other_nodes

SENDER = """
import sys, time, torch
from manymesh.workers.transfer.channel import Channel
from manymesh.workers.transfer.config import IpcConfig
from manymesh.workers.transfer.ipc import IpcTransfer

channel = Channel.serve("127.0.0.1", 30)
print(channel.address[1], flush=True)
transfer = IpcTransfer(IpcConfig(), "cpu")
transfer.connect(channel.round("connect"), 0, 1, "127.0.0.1")
for number in range(2):
    transfer.send(channel.round("sync"), number, [torch.full((100_000,), number + 1, dtype=torch.uint8)])
time.sleep(60)
"""


def mapped() -> int:
    """Buckets of a sender that this process has in its memory."""
    return len(re.findall("memfd:manymesh-weights", Path("/proc/self/maps").read_text()))


def test_a_bucket_outlives_a_sender_that_is_killed_and_nothing_outlives_the_receiver() -> None:
    named = set(os.listdir("/dev/shm"))
    with subprocess.Popen([sys.executable, "-c", SENDER], stdout=subprocess.PIPE, text=True) as sender:
        assert sender.stdout is not None
        channel = Channel.join(("127.0.0.1", int(sender.stdout.readline())), 30)
        transfer = IpcTransfer(IpcConfig(), "cpu")
        transfer.connect(channel.round("connect"), 1, 1, "127.0.0.1")
        (piece,) = transfer.receive(channel.round("sync"), 0, [100_000])
        (other,) = transfer.receive(channel.round("sync"), 1, [100_000])
        sender.kill()
    assert (int(piece.min()), int(piece.max()), int(other.min())) == (1, 1, 2)
    assert mapped() == 2
    transfer.close()
    del piece, other
    assert mapped() == 0
    assert {name for name in set(os.listdir("/dev/shm")) - named if "manymesh" in name} == set(), "it has no name"


def test_ends_on_several_nodes_are_refused() -> None:
    with pytest.raises(Refused, match=r"receiver 1, receiver 3 on other nodes than the sender[\s\S]*'collective'"):
        refuse_other_nodes([Place("a", "GPU-a"), Place("b", "GPU-a"), Place("a", "GPU-b"), Place("c", "GPU-c")])
    refuse_other_nodes([Place("a"), Place("a")])


def test_a_receiver_that_cannot_open_the_senders_memory_is_refused() -> None:
    transfer = IpcTransfer(IpcConfig(), "cpu")
    round_: Any = SimpleNamespace(
        put=lambda key, value: None, get=lambda key, what: b'{"name": "x", "size": 1, "file": "/proc/1/fd/none"}'
    )
    with pytest.raises(Refused, match=r"receiver 2: \w+Error[\s\S]*'object_store'"):
        transfer.connect(round_, 2, 2, "127.0.0.1")


def test_torch_opens_on_cuda_what_it_shared_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handle crosses as text; the device has the receiver's own number."""
    data = torch.empty(8, dtype=torch.uint8)
    told = [torch.Tensor, data.size(), data.stride(), 0, torch.storage.TypedStorage, torch.uint8]
    told += [0, b"memory\xff", 512, 128, False, b"counter", 3, b"event", True]
    opened: list[Any] = []
    monkeypatch.setattr(ipc, "reduce_tensor", lambda tensor: (None, tuple(told)))
    monkeypatch.setattr(ipc, "rebuild_cuda_tensor", lambda *args: opened.append(list(args)))
    handle = {"size": 8, "cuda": [None, ipc._cuda_handle(data)]}
    ipc.open_shared(json.loads(json.dumps(handle)), 2, torch.device("cuda", 5))
    assert opened == [[*told[:6], 5, *told[7:]]]
