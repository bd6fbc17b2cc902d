"""The engine: torch's DistributedDataParallel, a whole model on every rank.

What DDP does otherwise than the contract, and what is done about it:
- it averages gradients over ranks: a communication hook sums them;
- it reduces whatever stands in `.grad`: gradients of earlier calls step aside;
- it must be told which micro-batch is the last: `no_sync`;
- after a forward that was refused it waits for its backward: it is reset.

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
from manymesh.parts import checkpoint_directory
from manymesh.parts.adamw import ScheduledAdamW
from manymesh.parts.agreement import on_every_rank
from manymesh.parts.live_weights import WeightTable
from manymesh.parts.log_probs import token_outputs, without_padding
from manymesh.parts.micro_batches import check_loss, check_padded, check_request
from manymesh.parts.pretrained import load_causal_lm
from manymesh.parts.torch_checkpoint import read_tensors, write_tensors
from manymesh.parts.world_mesh import world_mesh, world_size
from tensordict import TensorDict
from torch.nn.parallel import DistributedDataParallel

from core.device import choose_device
from core.engine import MicroResult, StepInfo, WeightSpec
from core.errors import Refused
from core.loss import LossFn, LossScale
from core.manifest import Limits
from core.mesh import RankMesh

from .config import DdpEngineConfig
from .plan import plan

NAME = "ddp-engine"  # in the manifest; a checkpoint says which engine wrote it
Adapter = Literal["merged", "only"]


@attrs.frozen
class Loaded:
    """What `initialize` makes."""

    model: Any  # a transformers model
    ddp: DistributedDataParallel | None  # the same one, as it is trained
    weights: WeightTable
    optimizer: ScheduledAdamW | None


class DdpEngine:
    """Meets `core.engine.Engine`.

    Args:
        config: options.
        device: "cpu", "cuda" or None for what the machine has.

    Raises:
        Refused: torch.distributed is not initialised, no such device, or a config that cannot be planned.
    """

    def __init__(self, config: DdpEngineConfig, device: str | None = None) -> None:
        if not dist.is_initialized():
            raise Refused("the engine needs torch.distributed", mend="call core.device.join_world first")
        self._config = config
        self._device = choose_device(device, int(os.environ.get("LOCAL_RANK", "0")))
        planned = plan(config, world_size(), None)
        self._limits, self._mesh = planned.limits, world_mesh(planned)
        self._loaded: Loaded | None = None

    @property
    def mesh(self) -> RankMesh:
        return self._mesh

    @property
    def limits(self) -> Limits:
        return self._limits

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
        ddp = self._wrapped(model) if config.trainable else None
        self._loaded = Loaded(model, ddp, WeightTable(model), optimizer)

    def _wrapped(self, model: torch.nn.Module) -> DistributedDataParallel:
        """Collective: DDP sends rank 0's parameters to all, and sums gradients."""
        ddp = DistributedDataParallel(
            model,
            bucket_cap_mb=self._config.bucket_mb,
            find_unused_parameters=self._config.find_unused_parameters,
            broadcast_buffers=False,  # rotary tables are the same everywhere
        )
        ddp.register_comm_hook(dist.group.WORLD, _summed)
        return ddp

    def train_mode(self) -> AbstractContextManager[None]:
        """Raises Refused for an engine that is not trainable."""
        self._training()
        return self._mode(training=True)

    def eval_mode(self) -> AbstractContextManager[None]:
        self._ready()
        return self._mode(training=False)

    @contextmanager
    def _mode(self, *, training: bool) -> Iterator[None]:
        model = self._ready().model
        before = model.training
        model.train(training)
        try:
            yield
        finally:
            model.train(before)

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
        loaded, where = self._ready(), f"{type(self).__name__}.forward_backward"
        wanted = check_request(
            self._limits, loss_fn, outputs, temperature=temperature, forward_only=forward_only, where=where
        )
        for batch in micro_batches:
            check_padded(batch, wanted, where=where)
        optimizer = None if forward_only else self._training()
        parameters = list(loaded.model.parameters())
        earlier = [parameter.grad for parameter in parameters]  # summed over ranks already: not once more
        if optimizer is not None:
            optimizer.zero_grad()
        results = []
        try:
            for number, batch in enumerate(micro_batches, 1):
                batch = batch.to(self._device)
                with self._pass(loaded, forward_only=forward_only, last=number == len(micro_batches)) as model:
                    made = self._outputs(model, batch, wanted, temperature)
                    metrics: Mapping[str, Any] = {}
                    if loss_fn is not None:
                        loss, metrics = loss_fn({name: made[name] for name in loss_fn.needs}, batch, scale)
                        if not forward_only:
                            check_loss(loss, loss_fn, where=where)
                            loss.backward()
                kept = {name: made[name] for name in outputs} if forward_only else {}
                results.append(MicroResult(TensorDict(kept, batch.batch_size) if kept else None, metrics))
            if optimizer is not None:
                _add(parameters, earlier)
        except BaseException:
            if optimizer is not None and loaded.ddp is not None:
                optimizer.zero_grad()
                # A forward without its backward leaves DDP waiting, and the next pass would be reduced too early. torch
                # has no public way to tell it.
                loaded.ddp.reducer._reset_state()
            raise
        return results

    @contextmanager
    def _pass(self, loaded: Loaded, *, forward_only: bool, last: bool) -> Iterator[Any]:
        """The model for one micro-batch. DDP reduces in backward, with the last one alone."""
        if forward_only or loaded.ddp is None:
            with torch.no_grad():
                yield loaded.model
        else:
            with nullcontext() if last else loaded.ddp.no_sync():
                yield loaded.ddp

    def _outputs(
        self, model: Any, batch: TensorDict, wanted: frozenset[str], temperature: float
    ) -> dict[str, torch.Tensor]:
        """The wanted outputs, padded (rows, tokens) fp32, 0 at position 0 and in padding."""
        if not wanted:
            return {}
        # No mask: padding stands on the right, where a causal model's real tokens don't look.
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        made = token_outputs(
            logits,
            batch["input_ids"],
            temperature,
            entropy="entropy" in wanted,
            teacher_ids=batch["teacher_ids"] if "top_log_probs" in wanted else None,
        )
        mask = batch["attention_mask"].bool()
        return {name: without_padding(value, mask) for name, value in made.items() if name in wanted}

    def optimizer_zero_grad(self) -> None:
        self._training().zero_grad()

    def optimizer_step(self) -> StepInfo:
        """Raises Refused without gradients."""
        return self._training().step()

    def lr_scheduler_step(self) -> float:
        optimizer = self._training()
        used = optimizer.lr
        optimizer.schedule_step += 1
        return used

    def weight_specs(self, adapter: Adapter = "merged") -> Sequence[WeightSpec]:
        return self._weights(adapter).specs()

    def export_weights(
        self, adapter: Adapter = "merged", dst: Literal["all", "first"] = "all"
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """See core.engine.Engine. A tensor is the receiver's own: later training doesn't change it."""
        return self._export(self._weights(adapter), empty=dst == "first" and self._mesh.rank > 0)

    def _export(self, weights: WeightTable, *, empty: bool) -> Iterator[tuple[str, torch.Tensor]]:
        for spec in weights.specs():
            tensor = weights.target(spec.name)
            yield spec.name, tensor.new_empty(0) if empty else tensor.clone()

    def load_weights(self, stream: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Raises Refused: an unknown or doubled name or a wrong shape, at once; missing names, at the end."""
        self._weights("merged").load(stream)

    def adapter_disabled(self) -> AbstractContextManager[None]:
        raise _not_offered("adapters")

    def to(self, device: Literal["cpu", "device"], *, model: bool, optimizer: bool, grad: bool) -> None:
        raise _not_offered("offload")

    def save_checkpoint(self, path: str, *, step: int) -> None:
        """Collective. Replaces an older checkpoint at `path` once the new one is whole.

        Raises:
            Refused: on all ranks, where any cannot write. The engine and what was at `path` are untouched.
        """
        tensors = self._tensors() | checkpoint_directory.rng_tensors(self._device, self._mesh.rank)
        checkpoint_directory.save(
            path, self._contents(step), lambda directory: write_tensors(directory, tensors), dist.group.WORLD
        )

    def load_checkpoint(self, path: str) -> int:
        """Collective. Random generators too, at the world size that it was saved with.

        Raises:
            Refused: on all ranks and with nothing changed, where there is no checkpoint, it is damaged, or it is of
                another model.
        """
        have = checkpoint_directory.check(path, self._contents(0), dist.group.WORLD)
        same_world = have.world_size == world_size()
        rng = checkpoint_directory.rng_tensors(self._device, self._mesh.rank) if same_world else {}
        read_tensors(path, self._tensors() | rng)
        if rng:
            checkpoint_directory.set_rng(rng, self._device, self._mesh.rank)
        if (optimizer := self._ready().optimizer) is not None:
            optimizer.zero_grad()
            optimizer.schedule_step = have.schedule_step
        return have.step

    def _tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds, not copied: reading writes into them."""
        loaded = self._ready()
        tensors = {f"model.{name}": parameter.detach() for name, parameter in loaded.model.named_parameters()}
        if loaded.optimizer is not None:
            tensors |= {f"optimizer.{name}": tensor for name, tensor in loaded.optimizer.tensors().items()}
        return tensors

    def _contents(self, step: int) -> checkpoint_directory.Contents:
        loaded = self._ready()
        return checkpoint_directory.Contents(
            engine=NAME,
            step=step,
            schedule_step=loaded.optimizer.schedule_step if loaded.optimizer else 0,
            model_type=str(loaded.model.config.model_type),
            world_size=world_size(),
            parameters={name: list(parameter.shape) for name, parameter in loaded.model.named_parameters()},
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

    def _weights(self, adapter: Adapter) -> WeightTable:
        loaded = self._ready()
        if adapter == "only":
            raise _not_offered("adapters")
        return loaded.weights


def _summed(group: Any, bucket: Any) -> Any:
    """DDP's communication hook, in place of its own, which averages."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


_summed.__annotations__.clear()  # DDP compares them with classes, and postponed ones are strings


def _add(parameters: Sequence[torch.nn.Parameter], earlier: Sequence[torch.Tensor | None]) -> None:
    """Add the gradients of earlier calls to this one's."""
    for parameter, before in zip(parameters, earlier, strict=True):
        if before is not None:
            parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)


def _not_offered(what: str) -> Refused:
    return Refused(f"the engine has no {what}", where=NAME, mend="its capabilities are in its manifest")
