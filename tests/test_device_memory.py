"""Caches are emptied where another process needs the room: before its engine takes memory, and after a trainer's turn.

There is no device here: torch's module of the device is a recorder, and the order of calls is what counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import attrs
import pytest
import torch
from tensordict import TensorDict

from core.config import RolloutConfig
from core.device import Accelerators
from core.engine import WeightSpec
from core.manifest import Limits
from core.mesh import MeshLayout, RankMesh
from core.rollout import MemoryTag, SamplingParams
from core.worker import WorkerContext, placed
from manymesh.parts.base_rollout import BaseReleasingRollout, Bucket
from manymesh.parts.device_memory import empty_caches
from manymesh.parts.engine_base import OffloadEngineBase
from manymesh.workers import ActorRolloutRefWorker, TrainingWorker, TrainingWorkerConfig
from sdk.reference import PolicyLoss, make_batch

CUDA = torch.device("cuda", 0)
EMPTIED = ["gc", "ipc_collect", "empty_cache"]


def alone() -> RankMesh:
    layout = MeshLayout.of(dp=1)
    return RankMesh(layout, 0, layout.route(("dp",)))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is called, in order."""
    calls: list[str] = []
    module = SimpleNamespace(**{name: lambda name=name: calls.append(name) for name in EMPTIED[1:]})
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr("gc.collect", lambda: calls.append("gc"))
    return calls


class Rollout(BaseReleasingRollout):
    """A rollout whose engine would be a process of its own, on the same GPU."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__(RolloutConfig("m"), "cpu", alone())
        self._device, self._calls = CUDA, calls

    def generate(self, prompts: TensorDict, sampling: SamplingParams, *, min_version: int | None = None) -> TensorDict:
        raise NotImplementedError

    def _build(self) -> Mapping[str, torch.Tensor]:
        self._calls.append("build")
        return {"w": torch.zeros(2)}

    def _load(self, bucket: Bucket) -> None:
        self._calls.append("load")

    def _end_load(self, version: int) -> None:
        self._calls.append("end_load")

    def _release_memory(self, tags: Sequence[MemoryTag], released_tags: frozenset[MemoryTag]) -> None:
        pass

    def _resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        self._calls.append(f"resume {' '.join(tags)}")


class Actor:
    """As much of an engine as update_weights and TrainingWorker call."""

    limits = Limits(outputs=frozenset({"log_probs"}))

    def initialize(self) -> None:
        pass

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        yield

    train_mode = eval_mode

    def forward_backward(self, *_: Any, **__: Any) -> None:
        return None

    def weight_specs(self) -> list[WeightSpec]:
        return [WeightSpec("w", (2,), "float32")]

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.ones(2)


def test_a_rollout_has_room_before_it_takes_memory_and_after_an_update(calls: list[str]) -> None:
    rollout = Rollout(calls)
    rollout.initialize()
    assert calls == [*EMPTIED, "build"]
    worker = ActorRolloutRefWorker({"role": "rollout", "rollout": {}})
    worker.rollout, worker.actor = rollout, cast(Any, SimpleNamespace(engine=Actor()))
    rollout.release(["kv_cache", "weights"])
    calls.clear()
    worker.update_weights()
    weights = [*EMPTIED, "resume weights", "load", "end_load", *EMPTIED]
    assert calls == [*weights, *EMPTIED, "resume kv_cache"]
    calls.clear()
    rollout.resume(["weights", "kv_cache"])  # nothing is released: no time is spent
    assert calls == []


@pytest.mark.parametrize("are_shared", [True, False])
def test_a_trainer_leaves_room_after_its_turn_where_its_gpu_is_shared(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, are_shared: bool
) -> None:
    monkeypatch.setattr("manymesh.workers.training.choose_device", lambda device: CUDA)
    with placed(WorkerContext(accelerators=Accelerators(("0",), (0,), 1, are_shared))):
        worker = TrainingWorker.__new__(TrainingWorker)
    worker.config, worker.engine = TrainingWorkerConfig(), cast(Any, Actor())
    worker._loss_fn = cast(Any, PolicyLoss())
    monkeypatch.setattr(worker, "_plan", lambda batches: [SimpleNamespace(micro_batches=[], scale=None)])

    def train_step(*_: Any) -> dict[str, Any]:
        calls.append("step")
        return {}

    monkeypatch.setattr(worker, "_train_step", train_step)
    batch = make_batch()
    for turn, done in (
        (worker.reset, []),
        (lambda: worker.infer_batch(batch), []),
        (lambda: worker.train_mini_batch(batch, epochs=2), ["step", "step"]),
    ):
        calls.clear()
        turn()
        assert calls == [*done, *(EMPTIED if are_shared else [])]


@attrs.define
class State:
    optimizer: None = None


class Engine(OffloadEngineBase[State]):
    """An engine whose model can be away."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__(alone(), Limits(), device=CUDA, parameters=True, optimizer=False)
        self._calls = calls

    def initialize(self) -> None:
        self._hold(State())

    def _move(self, part: Any, device: str) -> None:
        self._calls.append(f"{part} to {device}")

    def _set_training(self, training: bool) -> bool:
        return training

    forward_backward = weight_specs = export_weights = load_weights = cast(Any, lambda *_, **__: None)


def test_what_was_offloaded_is_given_back_to_the_device(calls: list[str]) -> None:
    engine = Engine(calls)
    engine.initialize()
    assert calls == ["model to cpu", *EMPTIED]
    calls.clear()
    with engine.eval_mode():
        assert calls == ["model to device"]
    assert calls == ["model to device", "model to cpu", *EMPTIED]


def test_there_is_nothing_to_empty_on_cpu(calls: list[str]) -> None:
    empty_caches(torch.device("cpu"))
    assert calls == []
