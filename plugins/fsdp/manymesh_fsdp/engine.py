"""The FSDP2 training engine: `fully_shard` over one axis, on any Hugging Face causal LM.

Reading order of a step: `train_mode`, `optimizer_zero_grad`, `forward_backward`, `optimizer_step`, `lr_scheduler_step`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import attrs
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from core.device import choose_device
from core.engine import MicroResult
from core.loss import LossFn, LossScale
from manymesh.parts.adamw import ScheduledAdamW
from manymesh.parts.engine_base import OffloadEngineBase, Part, require_world
from manymesh.parts.engine_checkpoint import TorchCheckpointer
from manymesh.parts.micro_batches import check_loss
from manymesh.parts.model_engine import ModelEngine, model_outputs
from manymesh.parts.world_mesh import world_mesh
from manymesh_fsdp.config import FsdpConfig
from manymesh_fsdp.model import drop_gradients, fsdp_modules, load_sharded
from manymesh_fsdp.plan import AXIS, plan
from manymesh_fsdp.weights import FsdpWeights


@attrs.frozen
class FsdpState:
    """What `initialize` makes."""

    model: Any  # a transformers model
    units: list[FSDPModule]  # the model and its decoder layers; none on one rank, where nothing is sharded
    weights: FsdpWeights
    optimizer: ScheduledAdamW | None


class FsdpEngine(OffloadEngineBase[FsdpState], ModelEngine[FsdpState]):
    """Meets `core.engine.Engine`, `OffloadEngine` and `CheckpointEngine`.

    The default process group spans the engine's ranks.

    Args:
        config: options; see FsdpConfig.
        device: "cpu", "cuda" or None for what the machine has.

    Raises:
        Refused: torch.distributed is not initialised, no such device, or a config that cannot be planned.
    """

    def __init__(self, config: FsdpConfig, device: str | None = None) -> None:
        require_world()
        on = choose_device(device)
        self._config = config = config.on(on.type)
        layout_plan = plan(config, dist.get_world_size())
        super().__init__(
            world_mesh(layout_plan),
            layout_plan.limits,
            device=on,
            parameters=config.offload_parameters,
            optimizer=config.offload_optimizer,
        )
        self._device_mesh = init_device_mesh(self._device.type, (dist.get_world_size(),), mesh_dim_names=(AXIS,))
        self._group = self._device_mesh.get_group(AXIS)
        self._checkpointer = TorchCheckpointer("fsdp", self._device)

    def initialize(self) -> None:
        """Collective: read the model, shard it, and make the optimizer with its state.

        Raises:
            Refused: on all ranks, where the directory holds no model, or not all of its weights.
        """
        torch.manual_seed(self._config.seed + self._mesh.rank)
        model = load_sharded(self._config, self._device_mesh, self._device)
        optimizer = None
        if self._config.trainable:
            parameters = dict(model.named_parameters())
            optimizer = ScheduledAdamW(parameters, self._config.optimizer, self._group)
        self._hold(FsdpState(model, fsdp_modules(model), FsdpWeights(model), optimizer))

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
        """Collective; see core.engine.Engine. Kept outputs stay on the device; training that fails leaves no gradients.

        Raises:
            Refused: an output that the engine doesn't have, a batch that isn't padded, weights that are on CPU, or
                training without a loss, or of an engine that is not trainable.
        """
        needs = self._check_pass(micro_batches, loss_fn, outputs, temperature=temperature, forward_only=forward_only)
        state = self._ready()
        model = state.model
        last = len(micro_batches) - 1
        results = []
        try:
            with torch.no_grad() if forward_only else nullcontext():
                for number, batch in enumerate(micro_batches):
                    if state.units and not forward_only and last > 0:
                        # Gradients are reduced over ranks once, with the last micro-batch.
                        model.set_requires_gradient_sync(number == last)
                        model.set_is_last_backward(number == last)
                    batch = batch if batch["input_ids"].device == self._device else batch.to(self._device)
                    values = model_outputs(model, batch, needs, temperature, packed=self._limits.packed)
                    metrics: Mapping[str, Any] = {}
                    if loss_fn is not None:
                        loss, metrics = loss_fn({name: values[name] for name in loss_fn.needs}, batch, scale)
                        if not forward_only:
                            check_loss(loss, loss_fn, where="FsdpEngine.forward_backward")
                            loss.backward()
                    columns = {name: values[name] for name in outputs} if forward_only else {}
                    results.append(MicroResult(TensorDict(columns, batch.batch_size) if columns else None, metrics))
        except BaseException:
            if not forward_only:
                drop_gradients(model)
            raise
        finally:
            # Full parameters that outlive the pass would hide what is written to the shards from the next pass.
            for unit in state.units:
                unit.reshard()
        return results

    def export_weights(self, dst: Literal["all", "first"] = "all") -> Iterator[tuple[str, torch.Tensor]]:
        """Collective; see core.engine.Engine. Works while parameters are on CPU too."""
        return self._ready().weights.export(self._device, dst)

    def _move(self, part: Part, device: Literal["cpu", "device"]) -> None:
        """A gradient lives where its parameter does, so it moves with the model."""
        state = self._ready()
        target = torch.device("cpu") if device == "cpu" else self._device
        if part == "model":
            state.model.to(target)
        elif state.optimizer is not None:
            state.optimizer.to(target)
