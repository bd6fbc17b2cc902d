"""Columns that are no tokens reach a backend that reads them, whole and with their rows; others refuse them by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from core.batch import flat, jagged, jagged_from, object_column, objects, to_jagged, to_padded
from core.dispatch import on_mesh, register
from core.engine import MicroResult, WeightSpec
from core.errors import Refused
from core.group import RayClassWithInitArgs
from core.loss import LossFn, LossScale
from core.manifest import Limits
from core.mesh import MeshLayout, RankMesh
from core.registry import EngineRegistry
from core.rollout import SamplingParams
from core.transport.local import LocalWorkerGroup
from core.worker import WorkerContext, placed
from manymesh.parts.engine_base import EngineBase
from manymesh.parts.rollout_rows import answer, read_prompts, repeat_samples, token_lists
from manymesh.workers import MicroBatchConfig, TrainingWorker, TrainingWorkerConfig
from manymesh.workers.rollout import GeneratingWorker

READS = frozenset({"pixels", "patches", "names"})


def mesh(rank: int = 0, world_size: int = 1) -> RankMesh:
    layout = MeshLayout.of(dp=world_size)
    return RankMesh(layout, rank, layout.route(("dp",)))


def with_inputs(batch: TensorDict) -> TensorDict:
    """Row i has pixels i, i + 1 patches of value i, and a name."""
    rows = len(batch)
    batch.set("inputs/pixels", torch.arange(rows).float()[:, None, None].expand(rows, 2, 3).contiguous())
    counts = torch.arange(1, rows + 1)
    batch.set("inputs/patches", jagged_from(torch.arange(rows).repeat_interleave(counts)[:, None].float(), counts))
    return batch.set("inputs/names", object_column([f"image {row}" for row in range(rows)]))


def row_of(batch: TensorDict, row: int) -> tuple[float, list[float], str]:
    """A row's pixel, its patches and its name."""
    values, offsets = flat(batch.get("inputs/patches"))
    patches = values[offsets[row] : offsets[row + 1], 0].tolist()
    return float(batch.get("inputs/pixels")[row, 0, 0]), patches, objects(batch.get("inputs/names"))[row]


def whole_row(number: int) -> tuple[float, list[float], str]:
    return float(number), [float(number)] * (number + 1), f"image {number}"


class SeesPixels:
    """A rollout whose sample of a prompt is its pixel."""

    weight_version = 0

    def __init__(self, reads: frozenset[str], rank: int, world_size: int) -> None:
        self._reads, self.mesh = reads, mesh(rank, world_size)

    def initialize(self) -> None: ...
    def shutdown(self) -> None: ...

    def generate(self, prompts: TensorDict, sampling: SamplingParams, *, min_version: int | None = None) -> TensorDict:
        rows, sample = repeat_samples(
            read_prompts(prompts, inputs=self._reads, backend="the rollout 'sees'"), sampling.num_samples
        )
        tokens = [[int(row_of(rows, row)[0]), int(sample[row])] for row in range(len(rows))]
        log_probs, reasons = [[-1.0, -1.0]] * len(rows), ["length"] * len(rows)
        return answer(rows, tokens, log_probs, reasons, sampling=sampling, weight_version=0)


class SeeingWorker(GeneratingWorker):
    """Holds SeesPixels on each rank."""

    def __init__(self, reads: frozenset[str]) -> None:
        self.rollout = SeesPixels(reads, self.rank, self.world_size)  # type: ignore[assignment]
        self.add_mesh("rollout", mesh(self.rank, self.world_size))


class SeesPatches(EngineBase[Any]):
    """An engine that notes the micro-batches that it runs, and reads the pixel of each row."""

    def __init__(self, reads: frozenset[str]) -> None:
        super().__init__(mesh(), Limits(), reads)
        self.initialize()
        self.micro_batches: list[TensorDict] = []

    def initialize(self) -> None:
        self._state = SimpleNamespace(optimizer=None)

    def _set_training(self, training: bool) -> bool:
        return training

    def weight_specs(self) -> list[WeightSpec]:
        return []

    def export_weights(self, dst: str = "all") -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())

    def load_weights(self, stream: Iterator[tuple[str, torch.Tensor]]) -> None: ...

    def forward_backward(
        self,
        micro_batches: Sequence[TensorDict],
        loss_fn: LossFn | None,
        scale: LossScale,
        *,
        forward_only: bool = False,
        outputs: frozenset[str] = frozenset(),
        temperature: float = 1.0,
    ) -> list[MicroResult]:
        self._check_pass(micro_batches, loss_fn, outputs, temperature=temperature, forward_only=forward_only)
        self.micro_batches += micro_batches
        return [
            MicroResult({"log_probs": each["inputs/pixels"][:, 0, :1] * each["attention_mask"]}, {})
            for each in micro_batches
        ]


@pytest.fixture
def training_worker(monkeypatch: pytest.MonkeyPatch) -> Callable[[frozenset[str]], TrainingWorker]:
    """`training_worker(reads)`: a worker whose engine reads these."""

    def build(reads: frozenset[str]) -> TrainingWorker:
        monkeypatch.setattr(EngineRegistry, "new", lambda *args, **options: SeesPatches(reads))
        with placed(WorkerContext()):
            return TrainingWorker(TrainingWorkerConfig("sees", micro_batch=MicroBatchConfig(max_rows=2)))

    return build


def prompts(rows: int) -> TensorDict:
    batch = TensorDict({}, batch_size=[rows])
    return with_inputs(batch.set("prompt_ids", jagged([torch.arange(1, row + 2) for row in range(rows)])))


def sequences(lengths: Sequence[int]) -> TensorDict:
    batch = TensorDict({}, batch_size=[len(lengths)])
    return with_inputs(batch.set("input_ids", jagged([torch.arange(1, length + 1) for length in lengths])))


def test_they_pass_through_generate_on_two_ranks_and_are_repeated_for_the_samples() -> None:
    group: Any = LocalWorkerGroup(RayClassWithInitArgs(SeeingWorker, READS), world_size=2)
    out = group.generate_sequences(prompts(6), SamplingParams(num_samples=2, max_new_tokens=2))
    responses = [row[-2:] for row in token_lists(out["input_ids"])]
    assert responses == [[row, sample] for row in range(6) for sample in (0, 1)]
    assert [row_of(out, row) for row in range(12)] == [whole_row(row // 2) for row in range(12)]


def test_a_rollout_that_does_not_read_one_refuses_it_by_name() -> None:
    group: Any = LocalWorkerGroup(RayClassWithInitArgs(SeeingWorker, READS - {"patches"}), world_size=2)
    with pytest.raises(Refused, match="the rollout 'sees' doesn't read the model inputs inputs/patches"):
        group.generate_sequences(prompts(4), SamplingParams(max_new_tokens=2))


@pytest.mark.parametrize("padded", [False, True])
def test_they_pass_through_micro_batches_as_they_are(
    training_worker: Callable[[frozenset[str]], TrainingWorker], padded: bool
) -> None:
    lengths = [3, 9, 2, 5, 7]
    batch = to_padded(sequences(lengths)) if padded else sequences(lengths)
    worker = training_worker(READS)
    answered = worker.infer_batch(batch)
    assert answered is not None
    assert answered[0] is not None
    log_probs = answered[0]["log_probs"]
    assert [float(values[0]) for values in (log_probs if padded else log_probs.unbind())] == [0, 1, 2, 3, 4]
    micro_batches: list[TensorDict] = worker.engine.micro_batches  # type: ignore[attr-defined]
    assert [len(each) for each in micro_batches] == [2, 2, 1]
    for micro_batch in micro_batches:
        for row, length in enumerate(micro_batch["attention_mask"].sum(1).tolist()):
            assert row_of(micro_batch, row) == whole_row(lengths.index(length))


def test_an_engine_that_does_not_read_one_refuses_it_by_name(
    training_worker: Callable[[frozenset[str]], TrainingWorker],
) -> None:
    with pytest.raises(Refused, match="the engine doesn't read the model inputs inputs/pixels"):
        training_worker(READS - {"pixels"}).infer_batch(sequences([3, 2]))


def test_they_are_sent_also_where_a_method_names_its_columns() -> None:
    class Counts(SeeingWorker):
        @register(on_mesh("rollout"), columns=("input_ids",))
        def names(self, batch: TensorDict) -> TensorDict:
            return batch.set("names", object_column([sorted(batch.keys())] * len(batch)))

    group: Any = LocalWorkerGroup(RayClassWithInitArgs(Counts, READS))
    out = group.names(sequences([2, 3]).set("old_log_probs", torch.zeros(2)))
    assert objects(out.get("names"))[0] == ["input_ids", "inputs/names", "inputs/patches", "inputs/pixels"]


def test_padding_and_its_inverse_leave_them_alone_even_where_they_are_as_wide_as_the_tokens() -> None:
    batch = sequences([3, 1])
    batch.set("inputs/pixels", torch.ones(2, 3))  # of just the mask's shape
    padded = to_padded(batch)
    for form in (padded, to_jagged(padded), to_padded(batch, rows=torch.tensor([0, 1]))):
        assert torch.equal(form["inputs/pixels"], torch.ones(2, 3))
        assert [row_of_patches(form, row) for row in (0, 1)] == [[0.0], [1.0, 1.0]]
    assert row_of_patches(to_padded(batch, rows=torch.tensor([1])), 0) == [1.0, 1.0]


def row_of_patches(batch: Mapping[str, Any], row: int) -> list[float]:
    values, offsets = flat(batch.get("inputs/patches"))
    patches: list[float] = values[offsets[row] : offsets[row + 1], 0].tolist()
    return patches
