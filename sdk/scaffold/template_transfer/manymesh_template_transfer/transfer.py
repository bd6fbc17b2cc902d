"""The transfer: plain TCP, one connection from the sender to each receiver.

It works as it is. Put your own link in the place of the sockets; the tests say whether what you made still is a
transfer. Whatever waits, waits by the round: it ends at the deadline, and when another end has failed.
"""

from __future__ import annotations

import json
import secrets
import select
import socket
from collections.abc import Sequence
from typing import Any

import torch

from core.device import choose_device, open_listener
from core.errors import ManymeshError
from core.transfer import TransferRound

from .config import TemplateTransferConfig


class TemplateTransfer:
    """Meets `core.transfer.WeightTransfer`.

    Args:
        config: options.
        device: "cpu" or "cuda": where pieces lie that are sent, and where received ones go.
    """

    def __init__(self, config: TemplateTransferConfig, device: str | None = None) -> None:
        self._chunk = config.chunk_kb << 10
        self._device = choose_device(device)
        self._links: list[socket.socket] = []  # at the sender one for each receiver, at a receiver one

    def connect(self, round_: TransferRound, index: int, num_receivers: int, host: str) -> None:
        if index == 0:
            self._accept(round_, num_receivers, host)
            return
        address, port, token = json.loads(round_.get("address", "the sender's address"))
        link = socket.create_connection((address, port), timeout=round_.timeout_s)
        link.setblocking(False)
        self._links.append(link)
        self._write(round_, link, bytes.fromhex(token))

    def _accept(self, round_: TransferRound, num_receivers: int, host: str) -> None:
        """Take the connections that know the token; the port is open to everybody on the network."""
        token = secrets.token_bytes(16)
        with open_listener(host) as listener:
            listener.setblocking(False)
            round_.put("address", json.dumps([host, listener.getsockname()[1], token.hex()]))
            while len(self._links) < num_receivers:
                self._until_ready(round_, listener, "the receivers to connect")
                link, _ = listener.accept()
                link.setblocking(False)
                answer = bytearray(len(token))
                self._links.append(link)
                self._read(round_, link, memoryview(answer), "a receiver's token")
                if not secrets.compare_digest(answer, token):
                    self._links.pop().close()

    def send(self, round_: TransferRound, number: int, pieces: Sequence[torch.Tensor]) -> None:
        for piece in pieces:
            data = _memory(piece.cpu())
            for link in self._links:
                self._write(round_, link, data)

    def receive(self, round_: TransferRound, number: int, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
        pieces = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        for piece in pieces:
            self._read(round_, self._links[0], _memory(piece), f"the sender's bucket {number}")
        return [piece.to(self._device) for piece in pieces]

    def free(self, number: int) -> None:
        """Nothing is kept: what `send` has written is on its way."""

    def close(self) -> None:
        for link in self._links:
            link.close()
        self._links.clear()

    def _write(self, round_: TransferRound, link: socket.socket, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            self._until_ready(round_, link, "a receiver to take bytes", writes=True)
            view = view[link.send(view[: self._chunk]) :]

    def _read(self, round_: TransferRound, link: socket.socket, view: memoryview, what: str) -> None:
        while view:
            self._until_ready(round_, link, what)
            size = link.recv_into(view[: self._chunk])
            if size == 0:
                raise ManymeshError("the other end has closed the connection", where=what)
            view = view[size:]

    def _until_ready(self, round_: TransferRound, link: socket.socket, what: str, *, writes: bool = False) -> None:
        """Between two looks at the round it sleeps in select, which returns as soon as the socket is ready."""
        readers, writers = ([], [link]) if writes else ([link], [])

        def pause(seconds: float) -> None:
            select.select(readers, writers, [], seconds)

        round_.wait_until(lambda: any(select.select(readers, writers, [], 0)), what, pause)


def _memory(piece: torch.Tensor) -> memoryview:
    """The bytes of a tensor on the CPU, not a copy."""
    array: Any = piece.numpy()
    return memoryview(array)
