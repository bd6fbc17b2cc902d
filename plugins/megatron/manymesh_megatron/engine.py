"""The Megatron engine: megatron-core's models, schedules and optimizer behind `core.engine.Engine`.

Reading order of a step: `train_mode`, `optimizer_zero_grad`, `forward_backward`, `optimizer_step`, `lr_scheduler_step`.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import manymesh_megatron.import_warnings  # isort: skip  # noqa: F401  # before megatron is imported
import attrs
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from tensordict import TensorDict

from core.engine import MicroResult, StepInfo, WeightSpec
from core.errors import Refused
from core.loss import LossFn, LossScale
from core.manifest import ModelFacts
from core.mesh import RankMesh
from manymesh.parts.agreement import agree, on_first_rank
from manymesh.parts.engine_base import OffloadEngineBase, Part, require_world
from manymesh_megatron.checkpoint import Checkpointer
from manymesh_megatron.config import MegatronConfig
from manymesh_megatron.ddp import in_ddp
from manymesh_megatron.engine_state import MegatronState
from manymesh_megatron.groups import close_groups, group_along, open_groups
from manymesh_megatron.model import build_chunks, start_value_head, transformer_config
from manymesh_megatron.offload import Parked, gradient_tensors, parameter_tensors, state_tensors
from manymesh_megatron.optimizer import ScheduledOptimizer
from manymesh_megatron.plan import plan
from manymesh_megatron.runtime import Runtime
from manymesh_megatron.schedule import Step, check_shapes, common_shapes
from manymesh_megatron.weights import MegatronWeights

_logger = logging.getLogger(__name__)


class MegatronEngine(OffloadEngineBase[MegatronState]):
    """Meets `core.engine.Engine`, `OffloadEngine` and `CheckpointEngine`.

    The default process group spans the engine's ranks.

    Args:
        config: options; see MegatronConfig.
        device: "cpu", "cuda" or None for what the machine has.
        model_type: "language_model" (log_probs, entropy; also for None) or "value_model" (values).

    Raises:
        Refused: torch.distributed is not initialised, no such device, a config that cannot be planned, or another
            Megatron engine of this process has another layout.
    """

    _keeps_gradients_apart = True  # in the flat buffers of megatron's DDP, which only training needs

    def __init__(self, config: MegatronConfig, device: str | None = None, *, model_type: str | None = None) -> None:
        require_world()
        self._runtime, self._value_head = Runtime.choose(config, device), model_type == "value_model"
        self._config = config = config.on(self._runtime.device.type)
        world = dist.group.WORLD
        self._model: ModelFacts = on_first_rank(world, lambda: ModelFacts.read(config.model))
        layout_plan = plan(config, dist.get_world_size(), self._model)
        limits = layout_plan.limits
        if self._value_head:
            limits = attrs.evolve(limits, outputs=frozenset({"values"}))
        if dist.get_rank() == 0:
            for note in layout_plan.notes:
                _logger.info(note)
        with self._runtime.scope():
            open_groups(self, config)
        mesh = RankMesh(layout_plan.layout, dist.get_rank(), layout_plan.route, group_along)
        super().__init__(
            mesh,
            limits,
            device=self._runtime.device,
            parameters=config.offload_parameters,
            optimizer=config.offload_optimizer,
        )
        self._parked: dict[Part, Parked] = {}
        self._one_shape = config.moe_dispatcher == "allgather" and self._mesh.dp_size > 1
        self._checkpointer = Checkpointer(config, self._model, self._runtime, self._mesh)

    def initialize(self) -> None:
        """Collective: build this rank's stages, read their weights, and make the optimizer.

        Raises:
            Refused: on all ranks, where the directory's weights are not those of the model, or cannot be read.
        """
        config = self._config
        with self._runtime.scope():
            open_groups(self, config)  # again, where shutdown closed them
            model_parallel_cuda_manual_seed(config.seed)
            transformer = transformer_config(config, self._model, self._runtime)
            models = build_chunks(config, transformer, self._model, self._runtime, value_head=self._value_head)
            groups = ProcessGroupCollection.use_mpu_process_groups()
            weights = MegatronWeights(models, transformer, self._model, groups, value_head=self._value_head)
            start_value_head(models, config.seed)
            self._read(weights)
            chunks: list[Any] = list(models)
            optimizer = None
            if config.trainable:
                chunks = in_ddp(models, transformer, config)
                optimizer = ScheduledOptimizer(chunks, config)
        self._state = MegatronState(models, chunks, transformer, weights, optimizer)
        self._hooks(False)
        self._hold(self._state)

    def _read(self, weights: MegatronWeights) -> None:
        problem: Refused | None = None
        try:
            weights.read_directory(self._model.path)
        except Refused as error:
            problem = error
        agree(dist.group.WORLD, problem)

    def _set_training(self, training: bool) -> bool:
        state = self._ready()
        before = bool(state.chunks[0].training)
        for chunk in state.chunks:
            chunk.train(training)
        self._hooks(training)
        return before

    def _hooks(self, gathering: bool) -> None:
        """With overlap_param_gather, parameters are whole only in forward passes under these hooks, or without them."""
        state = self._ready()
        if not (self._config.overlap_param_gather and state.optimizer):
            return
        with self._runtime.scope():
            for chunk in state.chunks:
                on = bool(chunk.remove_forward_pre_hook_handles)
                if gathering and not on:
                    chunk.enable_forward_pre_hook()
                elif on and not gathering:
                    chunk.disable_forward_pre_hook()

    def forward_backward(
        self,
        micro_batches: Sequence[TensorDict],
        loss_fn: LossFn | None,
        scale: LossScale,
        *,
        temperature: float = 1.0,
        forward_only: bool = False,
        outputs: frozenset[str] = frozenset(),
    ) -> list[MicroResult] | None:
        """Collective; see core.engine.Engine. Kept outputs stay on the device; training that fails leaves no gradients.

        Raises:
            Refused: an output that the engine doesn't have, a batch that isn't padded or not to a legal width, a number
                of micro-batches that the schedule cannot run, weights or, in training, gradients that are on CPU, or
                training without a loss, or of an engine that is not trainable.
        """
        needs = self._check_pass(micro_batches, loss_fn, outputs, temperature=temperature, forward_only=forward_only)
        if not forward_only:
            self._check_on_device("grad")
        state = self._ready()
        check_shapes(self._limits, micro_batches)
        step = Step(
            models=state.chunks,
            micro_batches=micro_batches,
            loss_fn=loss_fn,
            scale=scale,
            temperature=temperature,
            forward_only=forward_only,
            outputs=outputs,
            needs=needs,
            limits=self._limits,
            vocab_size=self._model.vocab_size or 0,
            device=self._runtime.device,
            multiple=self._config.tensor_parallel if self._config.sequence_parallel else 1,
            shapes=common_shapes(micro_batches, self._runtime.device) if self._one_shape else None,
        )
        try:
            with self._runtime.scope():
                results = step.run()
        except BaseException:
            if not forward_only:
                self.optimizer_zero_grad()
            raise
        state.has_gradients |= not forward_only
        return results if parallel_state.is_pipeline_last_stage(ignore_virtual=True) else None

    def optimizer_zero_grad(self) -> None:
        optimizer = self._training()
        state = self._ready()
        state.has_gradients = False
        if "grad" in self._away:
            return  # they come back as zeros
        with self._runtime.scope():
            for chunk in state.chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()

    def optimizer_step(self) -> StepInfo:
        """Collective. Raises Refused, with no step taken, without gradients, while parameters or optimizer state are
        on CPU, or where a checkpoint could not be written in the background; that one is given up then."""
        optimizer = self._training()
        self._check_on_device("model", "optimizer", "grad")
        if not self._ready().has_gradients:
            raise Refused("there is no gradient to step with", mend="call forward_backward between zero_grad and step")
        self._checkpointer.poll()
        with self._runtime.scope():
            return optimizer.step()

    def weight_specs(self) -> Sequence[WeightSpec]:
        return self._ready().weights.specs()

    def export_weights(self, dst: Literal["all", "first"] = "all") -> Iterator[tuple[str, torch.Tensor]]:
        """Collective; see core.engine.Engine. Parameters that are on CPU are loaded for the time."""
        weights = self._ready().weights

        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            with self.eval_mode():
                yield from weights.export(dst)

        return stream()

    def load_weights(self, stream: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Full tensors by the names of weight_specs, the same on every rank.

        Raises:
            Refused: an unknown or doubled name or a wrong shape, at once; missing names, at the end. What came
                before is loaded then.
        """
        state = self._ready()
        with self.eval_mode():
            try:
                state.weights.load(stream)
            finally:
                if state.optimizer is not None:
                    with self._runtime.scope():
                        state.optimizer.take_weights()

    def _move(self, part: Part, device: Literal["cpu", "device"]) -> None:
        """Gradients are not kept on the way to the CPU: they come back as zeros."""
        state = self._ready()
        if device == "device":
            self._parked.pop(part).restore()
        elif part == "model":
            self._parked[part] = Parked(parameter_tensors(state.models))
        elif part == "grad":
            self._parked[part] = Parked(gradient_tensors(state.chunks), keep=False)
            state.has_gradients = False
        elif state.optimizer is not None:
            self._parked[part] = Parked(state_tensors(state.optimizer))

    def save_checkpoint(self, path: str, *, step: int) -> None:
        """Collective. Replaces an older checkpoint once the new one is whole: with async_checkpoint not at once.

        Raises:
            Refused: on all ranks, where any cannot write. The engine and what was at `path` are untouched.
        """
        with self._all_there() as state:
            self._checkpointer.save(state, path, step)

    def load_checkpoint(self, path: str) -> int:
        """Collective. Model, optimizer, schedule and, of the same sizes, random states; gives the step.

        Raises:
            Refused: on all ranks and with nothing changed, where there is no checkpoint, it is damaged, or it is of
                another model.
        """
        with self._all_there() as state:
            have = self._checkpointer.load(state, path)
            if state.optimizer is not None:
                self.optimizer_zero_grad()
        return have.step

    def settle_checkpoint(self) -> None:
        """Collective. Wait for a checkpoint that is written in the background; see Checkpoints.settle."""
        self._checkpointer.settle()

    @contextmanager
    def _all_there(self) -> Iterator[MegatronState]:
        """Parameters, whole, and optimizer state on the device; what was away is sent away again."""
        state = self._ready()
        model, optimizer = "model" in self._away, "optimizer" in self._away
        self.to("device", model=model, optimizer=optimizer, grad=False)
        try:
            with self.eval_mode():
                yield state
        finally:
            self.to("cpu", model=model, optimizer=optimizer, grad=False)

    def shutdown(self) -> None:
        """Drop model and optimizer, and megatron's groups with the last engine. The process group is the worker's.

        Raises Refused on all ranks, when all else is done, where a checkpoint could not be written in the background.
        """
        try:
            self._checkpointer.settle()
        finally:
            super().shutdown()
            self._parked.clear()
            close_groups(self)
            gc.collect()  # megatron's objects refer to each other, and to gloo groups that have threads
