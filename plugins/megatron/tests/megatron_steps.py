"""What the tests run on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed.checkpoint as dcp
from tensordict import TensorDict

from core._rows.shards import deal_rows
from core.batch import select, take, to_jagged, to_padded
from core.config import OptimizerConfig
from core.loss import LossSpec
from core.worker import WorkerContext, placed
from manymesh.workers.micro_batch import MicroBatchConfig
from manymesh.workers.training import TrainingWorker, TrainingWorkerConfig
from manymesh_megatron.config import MegatronConfig
from manymesh_megatron.engine import MegatronEngine
from sdk.reference import BOTH, OPTIMIZER, TEMPERATURE, PolicyLoss, ValueLoss, scale_of

SLOW = attrs.evolve(OPTIMIZER, lr=1e-3)  # so that three steps stay near enough to compare losses
OUTPUTS = {"language_model": BOTH, "value_model": ValueLoss.needs}
LOSSES = {"language_model": "sdk.reference:PolicyLoss", "value_model": "sdk.reference:ValueLoss"}


@contextmanager
def engine_of(
    model: str, *, model_type: str = "language_model", optimizer: OptimizerConfig = OPTIMIZER, **options: Any
) -> Iterator[MegatronEngine]:
    engine = MegatronEngine(MegatronConfig(model, optimizer=optimizer, **options), "cpu", model_type=model_type)
    try:
        engine.initialize()
        yield engine
    finally:
        engine.shutdown()


def micro_batches(engine: MegatronEngine, batch: TensorDict, number: int = 4) -> list[TensorDict]:
    """This dp rank's rows, dealt in turn, in micro-batches that differ in rows and in width."""
    rows = torch.arange(len(batch))[engine.mesh.dp_rank :: engine.mesh.dp_size]
    multiple = engine.limits.sequence_multiple
    return [to_padded(to_jagged(select(batch, part)), multiple=multiple) for part in rows.tensor_split(number)]


def step(engine: MegatronEngine, batch: TensorDict, number: int = 4) -> tuple[float, bool]:
    """One optimizer step on a global batch: the gradient's norm, and whether the step was skipped."""
    loss = ValueLoss() if "values" in engine.limits.outputs else PolicyLoss()
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward(micro_batches(engine, batch, number), loss, scale_of(batch), temperature=TEMPERATURE)
        info = engine.optimizer_step()
        engine.lr_scheduler_step()
    return info.grad_norm, info.skipped


def weights(engine: MegatronEngine) -> dict[str, torch.Tensor]:
    return dict(engine.export_weights())


def checkpoint_tensors(path: str | Path) -> dict[str, torch.Tensor]:
    """Every whole tensor of a checkpoint, but random states, which are a layout's own."""
    tensors = {
        name: torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in dcp.FileSystemReader(path).read_metadata().state_dict_metadata.items()
        if ".rank" not in name
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(tensors, checkpoint_id=path, no_dist=True)
    return tensors


def infer(engine: MegatronEngine, batch: TensorDict) -> dict[str, torch.Tensor] | None:
    """Outputs of the whole batch, as one micro-batch, on ranks of the last stage."""
    outputs = OUTPUTS["value_model" if "values" in engine.limits.outputs else "language_model"]
    padded = to_padded(to_jagged(batch), multiple=engine.limits.sequence_multiple)
    with engine.eval_mode():
        results = engine.forward_backward(
            [padded] * engine.limits.micro_batch_multiple,
            None,
            scale_of(batch),
            temperature=TEMPERATURE,
            forward_only=True,
            outputs=outputs,
        )
    if results is None or results[0].outputs is None:
        return None
    width = batch["input_ids"].shape[1]
    return {name: value[:, :width] for name, value in results[0].outputs.items()}


def dp_size(world_size: int, options: Mapping[str, Any]) -> int:
    names = ("tensor_parallel", "pipeline_parallel", "context_parallel")
    return int(world_size // prod(options.get(name, 1) for name in names))


def train(
    rank: int,
    world_size: int,
    model: str,
    batches: Sequence[TensorDict],
    model_type: str = "language_model",
    loss: str | None = None,
    outputs: frozenset[str] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Through TrainingWorker: outputs on the first batch, then a step on each; at least four micro-batches a rank."""
    config = TrainingWorkerConfig(
        backend="megatron",
        engine={"model": model, "optimizer": attrs.asdict(SLOW), **options},
        model_type=model_type,
        loss=LossSpec(loss or LOSSES[model_type]),
        micro_batch=MicroBatchConfig(max_rows=len(batches[0]) // dp_size(world_size, options) // 4),
        device="cpu",
    )
    with placed(WorkerContext(rank=rank, world_size=world_size)):
        worker = TrainingWorker(config)
    mesh = worker.engine.mesh
    shard = deal_rows(len(batches[0]), mesh.dp_size, 1, "a test")[mesh.dp_rank]
    mine = [take(to_jagged(batch), shard.ranges()) for batch in batches]
    try:
        worker.reset()
        start = dict(worker.engine.export_weights())
        answer = worker.infer_batch(mine[0], tuple(outputs or OUTPUTS[model_type]), temperature=TEMPERATURE)
        metrics = [worker.train_mini_batch(batch, temperature=TEMPERATURE) for batch in mine]
        return {
            "collected": mesh.is_collect,
            "dp_rank": mesh.dp_rank,
            "outputs": dict(to_padded(answer[0]).items()) if answer is not None and answer[0] is not None else None,
            "steps": [{name: metric.total for name, metric in each.items()} for each in metrics],
            "start": start,
            "weights": dict(worker.engine.export_weights()),
        }
    finally:
        worker.shutdown()
