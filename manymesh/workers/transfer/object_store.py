"""Buckets through Ray's object store: one put on the sending node, and a copy on each receiving node."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import GetTimeoutError, RayError

from core.errors import Refused
from core.transfer import TransferRound
from manymesh.workers.transfer.config import ObjectStoreConfig


class BucketReferences:
    """An actor that holds references to buckets until all receivers have loaded them. Ray would keep an object for
    ever whose reference travels by another way than Ray's own calls."""

    def __init__(self) -> None:
        self._held: dict[int, list[Any]] = {}

    def put(self, number: int, reference: list[Any]) -> None:
        self._held[number] = reference

    def get(self, number: int) -> list[Any]:
        return self._held[number]

    def drop(self, number: int) -> None:
        self._held.pop(number, None)


class ObjectStoreTransfer:
    """A bucket's pieces go into shared memory as they are, in one copy; receivers on the node read them there."""

    def __init__(self, config: ObjectStoreConfig, device: str | None = None) -> None:
        if not ray.is_initialized():
            raise Refused("the transfer 'object_store' needs Ray", mend="put the groups on Ray, or choose another kind")
        self._references: Any = None  # the actor
        self._mine = False

    def connect(self, round_: TransferRound, index: int, num_receivers: int, host: str) -> None:
        if index == 0:
            name = f"weights-{uuid.uuid4().hex}"
            # Beside the sender, as the objects are, and gone with it.
            self._references, self._mine = ray.remote(BucketReferences).options(name=name, num_cpus=0).remote(), True
            _get(self._references.drop.remote(-1), round_, "the actor that holds references to start")
            round_.put("actor", name)
        else:
            self._references = ray.get_actor(round_.get("actor", "the sender's actor").decode())

    def send(self, round_: TransferRound, number: int, pieces: Sequence[torch.Tensor]) -> None:
        reference = ray.put([piece.cpu().numpy() for piece in pieces])
        _get(self._references.put.remote(number, [reference]), round_, "the actor that holds references")
        round_.put(f"put.{number}")

    def receive(self, round_: TransferRound, number: int, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
        round_.get(f"put.{number}", f"the sender's bucket {number}")
        (reference,) = _get(self._references.get.remote(number), round_, "the actor that holds references")
        return [_tensor(array) for array in _get(reference, round_, f"bucket {number}")]

    def free(self, number: int) -> None:
        self._references.drop.remote(number)

    def close(self) -> None:
        actor, self._references = self._references, None
        if self._mine and actor is not None:
            with suppress(RayError):
                ray.kill(actor)
        self._mine = False


def _get(reference: Any, round_: TransferRound, what: str) -> Any:
    """ray.get that hears of a stop."""
    values: list[Any] = []

    def pause(seconds: float) -> None:
        with suppress(GetTimeoutError):
            values.append(ray.get(reference, timeout=max(seconds, 0.01)))

    round_.wait_until(lambda: bool(values), what, pause)
    return values[0]


def _tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of memory that must not be written to: it is only read
        return torch.from_numpy(array)
