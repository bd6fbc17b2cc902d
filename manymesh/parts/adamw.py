"""AdamW over parameters that are sharded or whole, with clipping, a learning-rate schedule and a guard against
non-finite gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from core.config import OptimizerConfig
from core.engine import StepInfo
from core.errors import Refused
from manymesh.parts.schedule import Scheduled


class ScheduledAdamW(Scheduled):
    """AdamW with weight decay on matrices only, its state made at once so that a checkpoint always has it.

    Args:
        parameters: by name, all sharded over `group` (DTensors), or plain where the group is one rank.
        group: the process group of their mesh; None where every rank holds all of every parameter, and of its gradient.

    Raises:
        Refused: parameters of 16 bits, since they are what the optimizer steps.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], config: OptimizerConfig, group: Any = None
    ) -> None:
        self._parameters, self._group = dict(parameters), group
        if short := sorted({str(p.dtype) for p in self._parameters.values() if p.element_size() < 4}):
            raise Refused(
                "in 16 bits a step of a small learning rate changes no parameter",
                have=f"parameters of {', '.join(short)}",
                want="float32",
                mend="set dtype='float32', and compute in 16 bits where the engine can",
            )
        matrices = [p for p in self._parameters.values() if p.ndim > 1]
        others = [p for p in self._parameters.values() if p.ndim <= 1]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            [each for each in groups if each["params"]],
            lr=0.0,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._make_state()
        super().__init__(config, self._adamw.param_groups)

    def _make_state(self) -> None:
        # A step at learning rate 0 with zero gradients makes the state and moves nothing, but counts as a step, which
        # would change Adam's bias correction.
        for parameter in self._parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        self._adamw.step()
        self.zero_grad()
        for state in self._adamw.state.values():
            state["step"].zero_()

    def zero_grad(self) -> None:
        self._adamw.zero_grad(set_to_none=True)

    @torch.no_grad()
    def step(self) -> StepInfo:
        """Collective: clip by the norm over all ranks and step, or skip where that norm is not finite.

        Raises:
            Refused: there are no gradients.
        """
        # Local shards: the same arithmetic on DTensors costs several times as much in dispatch on small models.
        grads = [
            p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            for p in self._parameters.values()
            if p.grad is not None
        ]
        if not grads:
            raise Refused("there is no gradient to step with", mend="call forward_backward between zero_grad and step")
        # In fp32 whatever the gradients are; one all-reduce for all of them.
        square = torch.stack(torch._foreach_norm(grads, 2.0, dtype=torch.float32)).square().sum()
        if self._group is not None and dist.get_world_size(self._group) > 1:
            dist.all_reduce(square, group=self._group)
        norm = float(square.sqrt())  # the step's one wait for the device
        if not math.isfinite(norm):
            return StepInfo(norm, skipped=True)
        limit = self._config.max_grad_norm
        if limit and norm > limit:
            torch._foreach_mul_(grads, limit / (norm + 1e-6))
        self._adamw.step()
        return StepInfo(norm, skipped=False)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The state as tensors by name, not copied: writing to them writes to the state."""
        return {
            f"{name}.{key}": value
            for name, parameter in self._parameters.items()
            for key, value in self._adamw.state[parameter].items()
        }

    def to(self, device: torch.device) -> None:
        for state in self._adamw.state.values():
            state.update({key: value.to(device) for key, value in state.items()})
