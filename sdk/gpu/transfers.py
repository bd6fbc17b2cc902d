"""Step 09: weights between two processes on one machine, by every kind of transfer that is installed."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection as Pipe
from typing import Any

import torch

from core.errors import ManymeshError
from core.registry import Backend, EngineRegistry
from manymesh.workers.transfer.channel import Address, Channel
from manymesh.workers.transfer.connection import Connected, Connection, connect
from manymesh.workers.transfer.digest import digest
from sdk.gpu.step import StepRun, one_line
from sdk.gpu.tools import wait_for_device

TIMEOUT_S = 15.0  # of each wait of one end for the other
NEEDS_RAY = "object_store"  # its buckets are Ray's objects
NUM_BUCKETS = 6


def two_processes(run: StepRun) -> None:
    """Each kind with ends on the CPU and, where there is one, with both ends on this GPU."""
    devices = ["cpu", "cuda"] if run.on_cuda else ["cpu"]
    with Receiver() as receiver:
        for entry in EngineRegistry.default().entries:
            if not isinstance(entry, Backend) or entry.kind != "transfer":
                continue
            for device in devices:
                name = f"{entry.name}, ends on {device}"
                with run.part(name):
                    if entry.name == NEEDS_RAY:
                        run.absent(name, "its buckets are objects of a Ray cluster")
                    else:
                        _measure(run, receiver, entry.name, device, name)
        run.check("the receiving process is there to the end", receiver.is_alive())


def _measure(run: StepRun, receiver: Receiver, kind: str, device: str, name: str) -> None:
    """Buckets of a size that a model has, to the bit, or a refusal within the deadline."""
    bucket_bytes = (256 if run.on_cuda else 4) << 20
    channel = Channel.serve("127.0.0.1", TIMEOUT_S)
    backend = EngineRegistry.get(kind, kind="transfer")
    options = {"directory": str(run.folder / "buckets")} if kind == "disk" else {}
    link = Connection(kind, options, backend.choice, channel.address, 1, bucket_bytes, TIMEOUT_S)
    start = time.monotonic()
    receiver.begin(link, device, bucket_bytes)
    sender = connect(link, channel, 0, "127.0.0.1", device)
    if not isinstance(sender, Connected):
        answer, seconds = receiver.answer(), time.monotonic() - start
        in_time = seconds < 3 * TIMEOUT_S
        # Two ranks of NCCL on one GPU cannot meet: what counts is that it is said, in time.
        refused = device == "cuda" and torch.cuda.device_count() < 2 and kind == "collective"
        run.check(f"{name}: refused within the deadline", refused and in_time, f"{seconds:.1f} s: {one_line(sender)}")
        run.check(f"{name}: both ends hear of it", isinstance(answer, str), str(answer)[:300])
        return
    try:
        pieces = [_piece(bucket_bytes, number, device) for number in range(2)]
        want = [int(digest(pieces[number % 2])) for number in range(NUM_BUCKETS)]
        round_ = channel.round("weights")
        wait_for_device(run)
        start = time.perf_counter()
        for number in range(NUM_BUCKETS):
            if number >= 2:
                round_.get(f"loaded.{number - 2}", "the receiver")
                sender.transfer.free(number - 2)
            sender.transfer.send(round_, number, [pieces[number % 2]])
        have = receiver.answer()
        seconds = time.perf_counter() - start
        run.check(f"{name}: arrives to the bit", have == want, "" if have == want else str(have)[:300])
        run.figure(name, NUM_BUCKETS * bucket_bytes / seconds / 1e9, "GB/s", f"buckets of {bucket_bytes >> 20} MiB")
    finally:
        sender.transfer.close()


def _piece(size: int, seed: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).to(device)


class Receiver:
    """A process of its own that receives, as a rollout's would. It is one for all kinds: no failure of one may spoil
    it for the next."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)

    def __enter__(self) -> Receiver:
        self._process.start()
        self._pipe.recv()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def begin(self, link: Connection, device: str, bucket_bytes: int) -> None:
        self._pipe.send((link, device, bucket_bytes))

    def answer(self) -> Any:
        """Digests of what came, or what went wrong, in words. Raises TimeoutError."""
        if not self._pipe.poll(4 * TIMEOUT_S):
            raise TimeoutError("the receiver doesn't answer")
        return self._pipe.recv()


def _serve(pipe: Pipe) -> None:
    pipe.send("ready")
    while True:
        try:
            link, device, bucket_bytes = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(_received(link, device, bucket_bytes))
        except Exception as error:
            pipe.send(one_line(error))


def _received(link: Connection, device: str, bucket_bytes: int) -> list[int] | str:
    address: Address = link.address
    channel = Channel.join(address, link.timeout_s)
    end = connect(link, channel, 1, "127.0.0.1", device)
    if isinstance(end, ManymeshError):
        return one_line(end)
    round_, digests = channel.round("weights"), []
    try:
        for number in range(NUM_BUCKETS):
            (piece,) = end.transfer.receive(round_, number, [bucket_bytes])
            digests.append(int(digest(piece)))
            round_.put(f"loaded.{number}")
        return digests
    finally:
        end.transfer.close()
