"""A sender and a receiver that hold tensors in place of engines. A module of its own, for Ray's processes to import."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from core.engine import WeightSpec
from manymesh.workers.transfer.remote import WeightSink, WeightSource, WeightWorker

BYTES = 100_000_000
# As a small model's: an embedding that is larger than a bucket, layers, and many small ones.
SHAPES = {
    "embed": (5_000_000,),
    **{f"layers.{i}": (620_000,) for i in range(31)},
    **{f"norms.{i}": (200,) for i in range(100)},
}


class _Tensors:
    """Stands for an engine and for a rollout: export copies, as a gather does, and load copies into place."""

    weight_version: int | None = 0

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        random = torch.Generator().manual_seed(0)
        rest = BYTES // 4 - sum(size for (size,) in SHAPES.values())
        self._tensors = {
            name: torch.randn(shape, generator=random) for name, shape in {**SHAPES, "rest": (rest,)}.items()
        }

    def weight_specs(self) -> list[WeightSpec]:
        return [WeightSpec(name, tuple(tensor.shape), "float32") for name, tensor in self._tensors.items()]

    def export_weights(self, dst: str) -> Iterator[tuple[str, Any]]:
        return ((name, tensor.clone()) for name, tensor in self._tensors.items())

    def eval_mode(self) -> Any:
        return nullcontext()

    def begin_weight_update(self, specs: Sequence[WeightSpec], version: int) -> None: ...
    def finish_weight_update(self) -> None: ...
    def abort_weight_update(self) -> None: ...

    def load_bucket(self, bucket: Sequence[tuple[str, Any]]) -> None:
        for name, tensor in bucket:
            self._tensors[name].copy_(tensor)


class Sender(WeightWorker):
    def __init__(self) -> None:
        engine: Any = _Tensors()
        self.weight_source = WeightSource(engine, lambda: 0, "cpu", self.context)


class Receiver(WeightWorker):
    def __init__(self) -> None:
        rollout: Any = _Tensors()
        self.weight_sink = WeightSink(rollout, "cpu", self.context)
