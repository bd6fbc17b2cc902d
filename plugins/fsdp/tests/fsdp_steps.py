"""What the tests run on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict

from core.batch import select
from manymesh_fsdp.config import FsdpConfig
from manymesh_fsdp.engine import FsdpEngine
from sdk.reference import BOTH, OPTIMIZER, TEMPERATURE, PolicyLoss, scale_of


def shares(batch: TensorDict, rank: int, world_size: int, num_micro: int) -> list[TensorDict]:
    """This rank's micro-batches: rows dealt in turn."""
    rows = torch.arange(len(batch))[rank::world_size]
    return [select(batch, part) for part in rows.tensor_split(num_micro)]


def build(model: str, **options: Any) -> FsdpEngine:
    engine = FsdpEngine(FsdpConfig(model, **({"optimizer": OPTIMIZER} | options)), device="cpu")
    engine.initialize()
    return engine


def step(engine: FsdpEngine, batch: TensorDict, num_micro: int = 1) -> tuple[float, float, bool]:
    """One optimizer step on a global batch: this rank's loss, the gradient's norm, whether it was skipped."""
    mesh = engine.mesh
    with engine.train_mode():
        engine.optimizer_zero_grad()
        micro_batches = shares(batch, mesh.dp_rank, mesh.dp_size, num_micro)
        results = engine.forward_backward(micro_batches, PolicyLoss(), scale_of(batch), temperature=TEMPERATURE)
        info = engine.optimizer_step()
        engine.lr_scheduler_step()
    return sum(result.metrics["loss"].total for result in results), info.grad_norm, info.skipped


def weights(engine: FsdpEngine) -> dict[str, torch.Tensor]:
    return dict(engine.export_weights())


def infer(engine: FsdpEngine, batch: TensorDict, outputs: frozenset[str] = BOTH) -> dict[str, torch.Tensor]:
    """Outputs of the whole batch on this rank, whatever its peers are given."""
    with engine.eval_mode():
        (result,) = engine.forward_backward(
            [batch], None, scale_of(batch), temperature=TEMPERATURE, forward_only=True, outputs=outputs
        )
    assert result.outputs is not None
    return dict(result.outputs.items())


def train(
    rank: int, world_size: int, model: str, batches: Sequence[TensorDict], num_micro: int = 1, **options: Any
) -> dict[str, Any]:
    engine = build(model, **options)
    steps = [step(engine, batch, num_micro) for batch in batches]
    return {"steps": steps, "weights": weights(engine)}
