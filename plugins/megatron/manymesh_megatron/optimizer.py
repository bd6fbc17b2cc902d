"""megatron's optimizer with clipping, our schedule of learning rates, and a guard against non-finite gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as CoreOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from core.engine import StepInfo
from manymesh.parts.schedule import Scheduled
from manymesh_megatron.config import MegatronConfig

MOMENTS, MASTER = ("exp_avg", "exp_avg_sq"), "fp32_param"


@attrs.frozen(eq=False)
class Share:
    """What a rank's optimizer has of a parameter: consecutive elements, flat, not copied.

    Attributes:
        start: of these elements in the parameter.
        tensors: fp32, by MOMENTS, and by MASTER where the parameter itself isn't fp32.
        alone: whether no other data-parallel rank has these elements.
    """

    start: int
    tensors: dict[str, torch.Tensor]
    alone: bool


class ScheduledOptimizer(Scheduled):
    """AdamW over chunks in megatron's DDP; fp32 copies of bf16 parameters; its state split over dp where configured."""

    def __init__(self, chunks: Sequence[DistributedDataParallel], config: MegatronConfig) -> None:
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
        super().__init__(config.optimizer, self.core.param_groups)

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

    def shares(self, parameters: Iterable[torch.Tensor]) -> dict[int, Share]:
        """Of those parameters that this rank has a share of, by id. State that the first step would make is made."""
        for part in self.parts:
            part.init_state_fn(part.optimizer, part.config)
            if isinstance(part.optimizer, torch.optim.AdamW):  # megatron leaves out the count of steps
                for state in part.optimizer.state.values():
                    state.setdefault("step", torch.tensor(0.0))
        mains = [{id(main) for group in part.optimizer.param_groups for main in group["params"]} for part in self.parts]
        shares = {}
        for parameter in parameters:
            for part, own in zip(self.parts, mains, strict=True):
                main, start = _main(part, parameter)
                if id(main) in own:
                    state = part.optimizer.state[main]
                    tensors = {name: state[name].view(-1) for name in MOMENTS}
                    if main.dtype != parameter.dtype:
                        tensors[MASTER] = main.detach().view(-1)
                    shares[id(parameter)] = Share(start, tensors, isinstance(part, DistributedOptimizer))
        return shares

    @property
    def num_steps(self) -> int:
        """Adam's count, which its bias correction needs. torch keeps it by parameter, other Adams by group."""
        return max((int(each.get("step", 0)) for each in self._counting()), default=0)

    @num_steps.setter
    def num_steps(self, number: int) -> None:
        for each in self._counting():
            if isinstance(each.get("step"), torch.Tensor):
                each["step"].fill_(number)
            else:
                each["step"] = number

    def _counting(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = []
        for part in self.parts:
            inner = part.optimizer
            groups += inner.state.values() if isinstance(inner, torch.optim.AdamW) else inner.param_groups
        return groups

    def take_weights(self) -> None:
        """Copy the model's parameters into the optimizer's own fp32 ones, after they were loaded."""
        self.core.reload_model_params()


def _main(part: Any, parameter: torch.Tensor) -> tuple[Any, int]:
    """What an optimizer of megatron steps for a parameter, if it does, and where in the parameter that begins."""
    if not isinstance(part, DistributedOptimizer):
        return getattr(parameter, "main_param", parameter), 0
    place = part.model_param_group_index_map.get(parameter)
    if place is None:
        return None, 0
    group, number = place
    main = part.optimizer.param_groups[group]["params"][number]
    return main, part._get_model_param_range_map(parameter)["param"].start
