"""The engine: plain torch, a whole model on every rank, gradients summed over ranks.

It trains as it is. Put your own framework in the place of `initialize`, `forward_backward` and `optimizer_step`; the
tests say whether what you made still is an engine. Reading order of a step: `train_mode`, `optimizer_zero_grad`,
`forward_backward`, `optimizer_step`, `lr_scheduler_step`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import attrs
import torch
import torch.distributed as dist
from manymesh.parts.adamw import ScheduledAdamW
from manymesh.parts.agreement import on_every_rank
from manymesh.parts.engine_base import require_world
from manymesh.parts.engine_checkpoint import TorchCheckpointer
from manymesh.parts.live_weights import WeightTable
from manymesh.parts.micro_batches import check_loss
from manymesh.parts.model_engine import ModelEngine, model_outputs
from manymesh.parts.pretrained import load_causal_lm
from manymesh.parts.world_mesh import world_mesh, world_size
from tensordict import TensorDict

from core.device import choose_device
from core.engine import MicroResult
from core.loss import LossFn, LossScale

from .config import TemplateEngineConfig
from .plan import plan

NAME = "template-engine"  # in the manifest; a checkpoint says which engine wrote it


@attrs.frozen
class State:
    """What `initialize` makes."""

    model: Any  # a transformers model
    weights: WeightTable
    optimizer: ScheduledAdamW | None


class TemplateEngine(ModelEngine[State]):
    """Meets `core.engine.Engine` and `CheckpointEngine`.

    Args:
        config: options.
        device: "cpu", "cuda" or None for what the machine has.

    Raises:
        Refused: torch.distributed is not initialised, no such device, or a config that cannot be planned.
    """

    def __init__(self, config: TemplateEngineConfig, device: str | None = None) -> None:
        require_world()
        layout_plan = plan(config, world_size(), None)
        super().__init__(world_mesh(layout_plan), layout_plan.limits)
        self._device = choose_device(device)
        self._config = config.on(self._device.type)
        self._checkpointer = TorchCheckpointer(NAME, self._device)

    def initialize(self) -> None:
        """Collective: each rank reads the model.

        Raises:
            Refused: on all ranks, where the directory holds no model for one of them.
        """
        config = self._config
        torch.manual_seed(config.seed + self._mesh.rank)
        # What one rank cannot read, all refuse: the others would wait for it in the next collective.
        model = on_every_rank(
            dist.group.WORLD,
            lambda: load_causal_lm(config.model, config.dtype, attn_implementation=config.attn_implementation),
        )
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.requires_grad_(config.trainable).to(self._device)
        optimizer = ScheduledAdamW(dict(model.named_parameters()), config.optimizer) if config.trainable else None
        self._state = State(model, WeightTable(model), optimizer)

    def forward_backward(
        self,
        micro_batches: Sequence[TensorDict],
        loss_fn: LossFn | None,
        scale: LossScale,
        *,
        temperature: float = 1.0,
        forward_only: bool = False,
        outputs: frozenset[str] = frozenset(),
    ) -> list[MicroResult]:
        """Collective; see core.engine.Engine. Training that fails leaves no gradients.

        Raises:
            Refused: an output that the engine doesn't have, a batch that isn't padded, or training without a loss or
                of an engine that is not trainable.
        """
        needs = self._check_pass(micro_batches, loss_fn, outputs, temperature=temperature, forward_only=forward_only)
        state, optimizer = self._ready(), None if forward_only else self._training()
        parameters = list(state.model.parameters())
        earlier = [parameter.grad for parameter in parameters]  # summed over ranks already: not once more
        if optimizer is not None:
            optimizer.zero_grad()
        results = []
        try:
            with torch.no_grad() if forward_only else nullcontext():
                for batch in micro_batches:
                    batch = batch.to(self._device)
                    values = model_outputs(state.model, batch, needs, temperature)
                    metrics: Mapping[str, Any] = {}
                    if loss_fn is not None:
                        loss, metrics = loss_fn({name: values[name] for name in loss_fn.needs}, batch, scale)
                        if not forward_only:
                            check_loss(loss, loss_fn, where="forward_backward")
                            loss.backward()
                    columns = {name: values[name] for name in outputs} if forward_only else {}
                    results.append(MicroResult(TensorDict(columns, batch.batch_size) if columns else None, metrics))
            if optimizer is not None:
                _sum_over_ranks(parameters, earlier)
        except BaseException:
            if optimizer is not None:
                optimizer.zero_grad()
            raise
        return results

    def export_weights(self, dst: Literal["all", "first"] = "all") -> Iterator[tuple[str, torch.Tensor]]:
        """See core.engine.Engine. A tensor is the receiver's own: later training doesn't change it."""
        return self._ready().weights.export(empty=dst == "first" and self._mesh.rank > 0)


def _sum_over_ranks(parameters: Sequence[torch.nn.Parameter], earlier: Sequence[torch.Tensor | None]) -> None:
    """Collective: this call's gradients summed over all ranks, and added to those of earlier calls."""
    # A parameter that no token of this rank reached (an expert) may have been reached on another.
    grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
    for wait in [dist.all_reduce(grad, async_op=True) for grad in grads]:
        wait.wait()
    for parameter, grad, before in zip(parameters, grads, earlier, strict=True):
        parameter.grad = grad if before is None else before.add_(grad)
