"""megatron's optimizer with clipping, our schedule of learning rates, and a guard against non-finite gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as CoreOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from core.protocols import StepInfo
from manymesh_megatron.config import MegatronConfig


class ScheduledOptimizer:
    """AdamW over chunks in megatron's DDP; fp32 copies of bf16 parameters; its state split over dp where configured."""

    def __init__(self, chunks: Sequence[DistributedDataParallel], config: MegatronConfig) -> None:
        self._config = config.optimizer
        options = CoreOptimizerConfig(
            optimizer="adam",
            lr=config.optimizer.lr,
            weight_decay=config.optimizer.weight_decay,
            adam_beta1=config.optimizer.betas[0],
            adam_beta2=config.optimizer.betas[1],
            adam_eps=config.optimizer.eps,
            clip_grad=config.optimizer.max_grad_norm,
            bf16=config.dtype == "bfloat16",
            params_dtype=getattr(torch, config.dtype),
            use_distributed_optimizer=config.distributed_optimizer,
            overlap_param_gather=config.overlap_param_gather,
        )
        self.core: Any = get_megatron_optimizer(options, list(chunks), use_gloo_process_groups=False)
        for group in self.core.param_groups:
            # megatron has its own scheduler apply this factor; until it ran, norms and biases would decay.
            group["weight_decay"] = config.optimizer.weight_decay * group["wd_mult"]
        self.schedule_step = 0

    @property
    def schedule_step(self) -> int:
        """How often the schedule has advanced. Setting it sets the learning rate."""
        return self._schedule_step

    @schedule_step.setter
    def schedule_step(self, step: int) -> None:
        self._schedule_step = step
        for group in self.core.param_groups:
            group["lr"] = self.lr * group["lr_mult"]

    @property
    def lr(self) -> float:
        return self._config.lr * self._config.lr_factor(self._schedule_step)

    @property
    def parts(self) -> list[Any]:
        """megatron's optimizers of dense and of expert parameters, those that hold any."""
        chained = getattr(self.core, "chained_optimizers", [self.core])
        return [each for each in chained if not getattr(each, "is_stub_optimizer", False)]

    @torch.no_grad()
    def step(self) -> StepInfo:
        """Collective: clip by the norm over all ranks and step, or skip where that norm is not finite."""
        found_inf = self.core.prepare_grads()
        norm = float(self.core.get_grad_norm() or 0.0)
        if found_inf or not math.isfinite(norm):
            return StepInfo(norm, skipped=True)
        if limit := self._config.max_grad_norm:
            for part in self.parts:
                if parameters := part.get_parameters():
                    clip_grad_by_total_norm_fp32(parameters, max_norm=limit, total_norm=norm)
        self.core.step_with_ready_grads()
        return StepInfo(norm, skipped=False)

    def zero_grad(self) -> None:
        self.core.zero_grad()

    def take_weights(self) -> None:
        """Copy the model's parameters into the optimizer's own fp32 ones, after they were loaded."""
        self.core.reload_model_params()
