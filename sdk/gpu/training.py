"""What the steps train with: rows, a loss that doesn't wait for the device, one optimizer step, a bare loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDict

from core.loss import LossScale, Metric
from sdk.gpu.step import StepRun
from sdk.reference import make_batch, scale_of


class QuietLoss:
    """Advantage-weighted log-probs. It reads no number, so that what waits for the device is the engine."""

    needs = frozenset({"log_probs"})

    def __call__(
        self, outputs: Mapping[str, torch.Tensor], batch: TensorDict, scale: LossScale
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        terms = batch["advantages"] * outputs["log_probs"] * batch["response_mask"]
        return -terms.sum() / scale.num_tokens, {}


class Rows:
    """Rows of one width on the run's device, in micro-batches."""

    def __init__(self, run: StepRun, num_rows: int, width: int, *, seed: int = 0) -> None:
        batch = make_batch([width] * num_rows, seed=seed, advantage=0.5)
        self.scale = scale_of(batch)
        self.num_tokens = num_rows * width
        self.batch = batch.to(run.device)

    def parts(self, number: int) -> list[TensorDict]:
        return list(self.batch.split(len(self.batch) // number))


def train_step(engine: Any, rows: Rows, num_micro: int = 1) -> float:
    """One optimizer step; the gradient's norm."""
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward(rows.parts(num_micro), QuietLoss(), rows.scale)
        info = engine.optimizer_step()
        engine.lr_scheduler_step()
    return float(info.grad_norm)


def bare_step(run: StepRun, model: str, rows: Rows, num_micro: int) -> Callable[[], None]:
    """The same step by a loop that a user would write on FSDP2 alone: fp32 parameters, bf16 passes, recomputing."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(run.device)
    net.gradient_checkpointing_enable()
    net.train()
    mesh = init_device_mesh(run.device, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in net.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-6, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for part in rows.parts(num_micro):
            logits = net(input_ids=part["input_ids"], use_cache=False).logits[:, :-1]
            nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), part["input_ids"][:, 1:].flatten())
            nll.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()

    return step


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu() for name, value in engine.export_weights()}
