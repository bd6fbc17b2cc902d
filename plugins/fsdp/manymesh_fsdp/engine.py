"""The FSDP2 training engine: `fully_shard` over one axis, on any Hugging Face causal LM.

Reading order of a step: `train_mode`, `optimizer_zero_grad`, `forward_backward`, `optimizer_step`, `lr_scheduler_step`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import attrs
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from core.device import choose_device
from core.engine import MicroResult, StepInfo, WeightSpec
from core.errors import Refused
from core.loss import LossFn, LossScale
from core.manifest import Limits
from core.mesh import RankMesh
from manymesh.parts import checkpoint_directory
from manymesh.parts.adamw import ScheduledAdamW
from manymesh.parts.log_probs import token_outputs, unpacked, without_padding
from manymesh.parts.micro_batches import check_loss, check_padded, check_request
from manymesh.parts.torch_checkpoint import read_tensors, write_tensors
from manymesh_fsdp.config import FsdpConfig
from manymesh_fsdp.model import drop_gradients, fsdp_modules, load_sharded, persistent
from manymesh_fsdp.plan import AXIS, plan
from manymesh_fsdp.weights import NamedWeights

Adapter = Literal["merged", "only"]


@attrs.frozen
class Loaded:
    """What `initialize` makes."""

    model: Any  # a transformers model
    units: list[FSDPModule]  # the model and its decoder layers; none on one rank, where nothing is sharded
    weights: NamedWeights
    optimizer: ScheduledAdamW | None


class FsdpEngine:
    """Meets `core.engine.Engine`. The default process group spans the engine's ranks.

    Args:
        config: options; see FsdpConfig.
        device: "cpu", "cuda" or None for what the machine has.

    Raises:
        Refused: torch.distributed is not initialised, no such device, or a config that cannot be planned.
    """

    def __init__(self, config: FsdpConfig, device: str | None = None) -> None:
        if not dist.is_initialized():
            raise Refused(
                "the engine needs torch.distributed to be initialised", mend="call core.device.join_world first"
            )
        self._config = config
        self._device = choose_device(device, int(os.environ.get("LOCAL_RANK", "0")))
        planned = plan(config, dist.get_world_size())
        self._limits = planned.limits
        self._device_mesh = init_device_mesh(self._device.type, (dist.get_world_size(),), mesh_dim_names=(AXIS,))
        self._group = self._device_mesh.get_group(AXIS)
        layout = planned.layout
        self._mesh = RankMesh(layout, dist.get_rank(), planned.route, self._group_along)
        self._loaded: Loaded | None = None
        self._on_device = {"model": True, "optimizer": True}

    @property
    def mesh(self) -> RankMesh:
        return self._mesh

    @property
    def limits(self) -> Limits:
        return self._limits

    def _group_along(self, *axes: str) -> Any:
        if axes != (AXIS,):
            raise Refused("the mesh has no such axes", have=axes, want=(AXIS,), where=str(self._mesh.layout))
        return self._group

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
        self._loaded = Loaded(model, fsdp_modules(model), NamedWeights(model), optimizer)
        self._on_device = {"model": True, "optimizer": True}
        self.to("cpu", model=self._config.offload_parameters, optimizer=self._config.offload_optimizer, grad=True)

    def train_mode(self) -> AbstractContextManager[None]:
        """Raises Refused for an engine that is not trainable."""
        self._training()
        return self._mode(training=True)

    def eval_mode(self) -> AbstractContextManager[None]:
        self._ready()
        return self._mode(training=False)

    @contextmanager
    def _mode(self, *, training: bool) -> Iterator[None]:
        # Load what is away, and send away again only that: a mode within a mode changes nothing for the outer one.
        load_model = not self._on_device["model"]
        load_optimizer = training and not self._on_device["optimizer"]
        model = self._ready().model
        before = model.training
        self.to("device", model=load_model, optimizer=load_optimizer, grad=load_model)
        model.train(training)
        try:
            yield
        finally:
            model.train(before)
            self.to(
                "cpu",
                model=load_model and self._config.offload_parameters,
                optimizer=load_optimizer and self._config.offload_optimizer,
                grad=True,
            )

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
        loaded = self._ready()
        model = loaded.model
        where = "FsdpEngine.forward_backward"
        wanted = check_request(
            self._limits, loss_fn, outputs, temperature=temperature, forward_only=forward_only, where=where
        )
        if not forward_only:
            self._training()
        self._on("model")
        for batch in micro_batches:
            check_padded(batch, wanted, where=where)
        last = len(micro_batches) - 1
        results = []
        try:
            with torch.no_grad() if forward_only else nullcontext():
                for number, batch in enumerate(micro_batches):
                    if loaded.units and not forward_only and last > 0:
                        # Gradients are reduced over ranks once, with the last micro-batch.
                        model.set_requires_gradient_sync(number == last)
                        model.set_is_last_backward(number == last)
                    batch = batch if batch["input_ids"].device == self._device else batch.to(self._device)
                    made = self._outputs(model, batch, wanted, temperature)
                    metrics: Mapping[str, Any] = {}
                    if loss_fn is not None:
                        loss, metrics = loss_fn({name: made[name] for name in loss_fn.needs}, batch, scale)
                        if not forward_only:
                            check_loss(loss, loss_fn, where=where)
                            loss.backward()
                    kept = {name: made[name] for name in outputs} if forward_only else {}
                    results.append(MicroResult(TensorDict(kept, batch.batch_size) if kept else None, metrics))
        except BaseException:
            if not forward_only:
                drop_gradients(model)
            raise
        finally:
            # Full parameters that outlive the pass would hide what is written to the shards from the next pass.
            for unit in loaded.units:
                unit.reshard()
        return results

    def _outputs(
        self, model: Any, batch: TensorDict, wanted: frozenset[str], temperature: float
    ) -> dict[str, torch.Tensor]:
        """The wanted outputs, padded (rows, tokens) fp32, 0 at position 0 and in padding."""
        if not wanted:
            return {}
        ids, mask = batch["input_ids"], batch["attention_mask"].bool()
        teacher_ids = batch["teacher_ids"] if "top_log_probs" in wanted else None
        positions = None
        if self._limits.packed:
            # One row of all tokens, told apart by positions that begin at 0 again. transformers does so only without a
            # mask and without a cache: with either, rows attend to each other.
            positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)[mask][None]
            ids = ids[mask][None]
            teacher_ids = teacher_ids[mask][None] if teacher_ids is not None else None
        # No mask: padding stands on the right, where a causal model's real tokens don't look.
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        made = token_outputs(logits, ids, temperature, entropy="entropy" in wanted, teacher_ids=teacher_ids)
        if self._limits.packed:
            made = {name: unpacked(value[0], mask) for name, value in made.items()}
        return {name: without_padding(value, mask) for name, value in made.items() if name in wanted}

    def optimizer_zero_grad(self) -> None:
        self._training().zero_grad()

    def optimizer_step(self) -> StepInfo:
        """Collective. Raises Refused without gradients, or while parameters or optimizer state are on CPU."""
        optimizer = self._training()
        self._on("model", "optimizer")
        return optimizer.step()

    def lr_scheduler_step(self) -> float:
        optimizer = self._training()
        used = optimizer.lr
        optimizer.schedule_step += 1
        return used

    def weight_specs(self, adapter: Adapter = "merged") -> Sequence[WeightSpec]:
        return self._named(adapter).specs()

    def export_weights(
        self, adapter: Adapter = "merged", dst: Literal["all", "first"] = "all"
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Collective; see core.engine.Engine. Works while parameters are on CPU too."""
        return self._named(adapter).export(self._device, dst)

    def load_weights(self, stream: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Full tensors by the names of weight_specs, the same on every rank.

        Raises:
            Refused: an unknown or doubled name or a wrong shape, at once; missing names, at the end. What came
                before is loaded then.
        """
        self._named("merged").load(stream)

    def adapter_disabled(self) -> AbstractContextManager[None]:
        """Raises Refused: the engine trains whole models."""
        raise _no_adapter()

    def to(self, device: Literal["cpu", "device"], *, model: bool, optimizer: bool, grad: bool) -> None:
        """Move parameters and buffers, and optimizer state.

        A gradient lives where its parameter does, so it moves with the model, whatever `grad` says.
        """
        loaded = self._ready()
        target = torch.device("cpu") if device == "cpu" else self._device
        if model:
            loaded.model.to(target)
            self._on_device["model"] = device == "device"
        if optimizer and loaded.optimizer is not None:
            loaded.optimizer.to(target)
            self._on_device["optimizer"] = device == "device"
        if device == "cpu" and self._device.type != "cpu" and (model or optimizer):
            torch.get_device_module(self._device).empty_cache()  # for other processes on the device

    def save_checkpoint(self, path: str, *, step: int) -> None:
        """Collective. Replaces an older checkpoint at `path` once the new one is whole.

        Raises:
            Refused: on all ranks, where any cannot write. The engine and what was at `path` are untouched.
        """
        tensors = self._tensors() | checkpoint_directory.rng_tensors(self._device, self._mesh.rank)
        checkpoint_directory.save(
            path, self._contents(step), lambda directory: write_tensors(directory, tensors), self._group
        )

    def load_checkpoint(self, path: str) -> int:
        """Collective. Model, optimizer, schedule and, at the world size it was saved with, random generators.

        Returns:
            the step that it was saved with.

        Raises:
            Refused: on all ranks and with nothing changed, where there is no checkpoint, it is damaged, or it is of
                another model.
        """
        have = checkpoint_directory.check(path, self._contents(0), self._group)
        same_world = have.world_size == self._mesh.layout.world_size
        rng = checkpoint_directory.rng_tensors(self._device, self._mesh.rank) if same_world else {}
        read_tensors(path, self._tensors() | rng)
        if rng:
            checkpoint_directory.set_rng(rng, self._device, self._mesh.rank)
        optimizer = self._ready().optimizer
        if optimizer is not None:
            optimizer.zero_grad()
            optimizer.schedule_step = have.schedule_step
        return have.step

    def _tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds, not copied."""
        loaded = self._ready()
        tensors = {f"model.{name}": tensor.detach() for name, tensor in persistent(loaded.model).items()}
        if loaded.optimizer is not None:
            tensors |= {f"optimizer.{name}": each for name, each in loaded.optimizer.tensors().items()}
        return tensors

    def _contents(self, step: int) -> checkpoint_directory.Contents:
        loaded = self._ready()
        return checkpoint_directory.Contents(
            engine="fsdp",
            step=step,
            schedule_step=loaded.optimizer.schedule_step if loaded.optimizer else 0,
            model_type=str(loaded.model.config.model_type),
            world_size=self._mesh.layout.world_size,
            parameters={name: list(tensor.shape) for name, tensor in persistent(loaded.model).items()},
            optimizer=loaded.optimizer is not None,
        )

    def shutdown(self) -> None:
        """Drop model and optimizer. The process group is the worker's."""
        self._loaded = None

    def _ready(self) -> Loaded:
        if self._loaded is None:
            raise Refused("the engine holds no model", mend="call initialize() first")
        return self._loaded

    def _training(self) -> ScheduledAdamW:
        optimizer = self._ready().optimizer
        if optimizer is None:
            raise Refused("the engine is not trainable", have="trainable=False", mend="set trainable=True")
        return optimizer

    def _on(self, *parts: str) -> None:
        if away := [part for part in parts if not self._on_device[part]]:
            raise Refused(
                f"{' and '.join(away)} {'are' if len(away) > 1 else 'is'} on CPU, sent there by to() or offload",
                mend="enter train_mode() or eval_mode(), or call to('device', ...)",
                where="FsdpEngine",
            )

    def _named(self, adapter: Adapter) -> NamedWeights:
        loaded = self._ready()
        if adapter == "only":
            raise _no_adapter()
        return loaded.weights


def _no_adapter() -> Refused:
    return Refused("the FSDP2 engine has no adapters", have="whole parameters are trained", mend="use adapter='merged'")
