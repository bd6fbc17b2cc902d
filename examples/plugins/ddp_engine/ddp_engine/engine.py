"""The engine: torch's DistributedDataParallel, a whole model on every rank.

What DDP does otherwise than the contract, and what is done about it:
- it averages gradients over ranks: a communication hook sums them;
- it reduces whatever stands in `.grad`: gradients of earlier calls step aside;
- it must be told which micro-batch is the last: `no_sync`;
- after a forward that was refused it waits for its backward: it is reset.

Reading order of a step: `train_mode`, `optimizer_zero_grad`, `forward_backward`, `optimizer_step`, `lr_scheduler_step`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
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
from torch.nn.parallel import DistributedDataParallel

from core.device import choose_device
from core.engine import MicroResult
from core.loss import LossFn, LossScale

from .config import DdpEngineConfig
from .plan import plan

NAME = "ddp-engine"  # in the manifest; a checkpoint says which engine wrote it


@attrs.frozen
class DdpState:
    """What `initialize` makes."""

    model: Any  # a transformers model
    ddp: DistributedDataParallel | None  # the same one, as it is trained
    weights: WeightTable
    optimizer: ScheduledAdamW | None


class DdpEngine(ModelEngine[DdpState]):
    """Meets `core.engine.Engine` and `CheckpointEngine`.

    Args:
        config: options.
        device: "cpu", "cuda" or None for what the machine has.

    Raises:
        Refused: torch.distributed is not initialised, no such device, or a config that cannot be planned.
    """

    def __init__(self, config: DdpEngineConfig, device: str | None = None) -> None:
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
        ddp = self._wrap(model) if config.trainable else None
        self._state = DdpState(model, ddp, WeightTable(model), optimizer)

    def _wrap(self, model: torch.nn.Module) -> DistributedDataParallel:
        """Collective: DDP sends rank 0's parameters to all, and sums gradients."""
        ddp = DistributedDataParallel(
            model,
            bucket_cap_mb=self._config.bucket_mb,
            find_unused_parameters=self._config.find_unused_parameters,
            broadcast_buffers=False,  # rotary tables are the same everywhere
        )
        ddp.register_comm_hook(dist.group.WORLD, _sum_gradients)
        return ddp

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
            for number, batch in enumerate(micro_batches, 1):
                batch = batch.to(self._device)
                with self._pass(state, forward_only=forward_only, last=number == len(micro_batches)) as model:
                    values = model_outputs(model, batch, needs, temperature)
                    metrics: Mapping[str, Any] = {}
                    if loss_fn is not None:
                        loss, metrics = loss_fn({name: values[name] for name in loss_fn.needs}, batch, scale)
                        if not forward_only:
                            check_loss(loss, loss_fn, where="forward_backward")
                            loss.backward()
                columns = {name: values[name] for name in outputs} if forward_only else {}
                results.append(MicroResult(TensorDict(columns, batch.batch_size) if columns else None, metrics))
            if optimizer is not None:
                _add(parameters, earlier)
        except BaseException:
            if optimizer is not None and state.ddp is not None:
                optimizer.zero_grad()
                # A forward without its backward leaves DDP waiting, and the next pass would be reduced too early. torch
                # has no public way to tell it.
                state.ddp.reducer._reset_state()
            raise
        return results

    @contextmanager
    def _pass(self, state: DdpState, *, forward_only: bool, last: bool) -> Iterator[Any]:
        """The model for one micro-batch. DDP reduces in backward, with the last one alone."""
        if forward_only or state.ddp is None:
            with torch.no_grad():
                yield state.model
        else:
            with nullcontext() if last else state.ddp.no_sync():
                yield state.ddp

    def export_weights(self, dst: Literal["all", "first"] = "all") -> Iterator[tuple[str, torch.Tensor]]:
        """See core.engine.Engine. A tensor is the receiver's own: later training doesn't change it."""
        return self._ready().weights.export(empty=dst == "first" and self._mesh.rank > 0)


def _sum_gradients(group: Any, bucket: Any) -> Any:
    """DDP's communication hook, in place of its own, which averages."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


_sum_gradients.__annotations__.clear()  # DDP compares them with classes, and postponed ones are strings


def _add(parameters: Sequence[torch.nn.Parameter], earlier: Sequence[torch.Tensor | None]) -> None:
    """Add the gradients of earlier calls to this one's."""
    for parameter, before in zip(parameters, earlier, strict=True):
        if before is not None:
            parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
