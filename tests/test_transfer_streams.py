"""The threads of a transfer have streams of their own on CUDA: what one launches, the other waits for. Streams and
events are fakes that write down who did what."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from core.engine import WeightSpec
from manymesh.workers.transfer.channel import Channel
from manymesh.workers.transfer.receiver import Receiver
from manymesh.workers.transfer.sender import Sender

NAMES = ("a", "b", "c", "d")
SPECS = [WeightSpec(name, (4,), "float32") for name in NAMES]
BUCKET_BYTES = 16  # one tensor


class Gpu:
    """What was launched, in order of the host, by stream; each thread has one. `reaches` says what must have run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done: dict[int, set[str]] = {}  # by stream: what runs before all that is launched on it from now on

    def _stream(self) -> set[str]:
        return self._done.setdefault(threading.get_ident(), set())

    def launch(self, what: str, *needs: str) -> None:
        with self._lock:
            missing = set(needs) - self._stream()
            assert not missing, f"{what} may run before {missing}"
            self._stream().add(what)

    def event(self) -> Any:
        gpu = self

        class Event:
            def record(self, stream: Any) -> None:
                with gpu._lock:
                    self.done = set(gpu._stream())

        return Event()

    def current_stream(self, device: Any = None) -> Any:
        gpu = self

        class Stream:
            def wait_event(self, event: Any) -> None:
                with gpu._lock:
                    gpu._stream().update(event.done)

        return Stream()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    fake = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    monkeypatch.setattr(torch.cuda, "current_stream", fake.current_stream)
    return fake


class Link:
    """Carries buckets within this process; launches copies on the stream of the thread that calls it."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._buckets: dict[int, Any] = {}

    def send(self, round_: Any, number: int, pieces: Any) -> None:
        self._gpu.launch(f"send {NAMES[number]}", f"gather {NAMES[number]}")
        self._buckets[number] = [piece.clone() for piece in pieces]

    def receive(self, round_: Any, number: int, sizes: Any) -> Any:
        before = [f"load {NAMES[number - 2]}"] if number >= 2 else []  # out of the buffer that is written again
        round_.wait_until(lambda: number in self._buckets, "the sender")
        self._gpu.launch(f"receive {NAMES[number]}", *before)
        return self._buckets[number]

    def free(self, number: int) -> None: ...
    def close(self) -> None: ...


class Rollout:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.loaded: list[str] = []

    def load_bucket(self, bucket: Any) -> None:
        for name, _ in bucket:
            self._gpu.launch(f"load {name}", f"receive {name}")
            self.loaded.append(name)

    def finish_weight_update(self) -> None: ...
    def abort_weight_update(self) -> None: ...


def test_each_thread_waits_for_what_the_other_has_launched(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests and joins of the pieces are on CPU here; only the order is that of a GPU."""
    channel, device = Channel.serve("127.0.0.1", 20), torch.device("cuda", 0)
    link: Any = Link(gpu)
    rollout: Any = Rollout(gpu)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *args, **options: tensor)
    receipts: list[Any] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name in NAMES:
            gpu.launch(f"gather {name}")
            yield name, torch.ones(4)

    def receive() -> None:
        far = Channel.join(channel.address, 20)
        receiver = Receiver(far, link, "receiver", 1, BUCKET_BYTES, device, index=1)
        receipts.append(receiver.receive(SPECS, rollout, "sync", 1))

    receiving = threading.Thread(target=receive, name="receiver")
    receiving.start()
    sender = Sender(channel, link, "sender", 1, BUCKET_BYTES, device)
    receipts.append(sender.send(SPECS, stream(), "sync", 1))
    receiving.join(30)
    assert [receipt.error for receipt in receipts] == ["", ""]
    assert rollout.loaded == list(NAMES)
