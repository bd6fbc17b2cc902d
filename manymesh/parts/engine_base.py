"""What the life of every engine is made of: its place, its modes, what a pass refuses, the schedule, and the end.

An engine subclasses EngineBase, or OffloadEngineBase where it can move its state to the CPU, and writes what is its
own: `initialize`, `forward_backward`, and its weights. `forward_backward` stays whole in the engine, so that it reads
from top to bottom; it begins with `self._check_pass(...)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import ClassVar, Generic, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from tensordict import TensorDict

from core.engine import MicroResult, StepInfo, WeightSpec
from core.errors import Refused
from core.loss import LossFn, LossScale
from core.manifest import Limits
from core.mesh import RankMesh
from manymesh.parts.device_memory import empty_caches
from manymesh.parts.micro_batches import check_padded, check_request


class Steps(Protocol):
    """An optimizer with its schedule, such as manymesh.parts.adamw.ScheduledAdamW."""

    schedule_step: int

    def zero_grad(self) -> None: ...
    def step(self) -> StepInfo: ...
    def advance(self) -> float: ...


class EngineState(Protocol):
    """What `initialize` builds. `optimizer` is None where the engine is not trainable."""

    @property
    def optimizer(self) -> Steps | None: ...


S = TypeVar("S", bound=EngineState)


def require_world() -> None:
    """Raises Refused where torch.distributed is not initialised, which comes before any engine."""
    if not dist.is_initialized():
        raise Refused("the engine needs torch.distributed to be initialised", mend="call core.device.join_world first")


class EngineBase(ABC, Generic[S]):
    """An engine without its model.

    Args:
        mesh, limits: valid from construction on.
        inputs: model inputs that it reads, as its manifest names them; a pass with others is refused.
    """

    def __init__(self, mesh: RankMesh, limits: Limits, inputs: Collection[str] = ()) -> None:
        self._mesh, self._limits, self._inputs = mesh, limits, frozenset(inputs)
        self._state: S | None = None

    @property
    def mesh(self) -> RankMesh:
        return self._mesh

    @property
    def limits(self) -> Limits:
        return self._limits

    def train_mode(self) -> AbstractContextManager[None]:
        """Raises Refused for an engine that is not trainable."""
        self._training()
        return self._mode(training=True)

    def eval_mode(self) -> AbstractContextManager[None]:
        """Raises Refused before `initialize`."""
        self._ready()
        return self._mode(training=False)

    @contextmanager
    def _mode(self, *, training: bool) -> Iterator[None]:
        before = self._set_training(training)
        try:
            yield
        finally:
            self._set_training(before)

    def optimizer_zero_grad(self) -> None:
        self._training().zero_grad()

    def optimizer_step(self) -> StepInfo:
        """Collective. Raises Refused without gradients."""
        return self._training().step()

    def lr_scheduler_step(self) -> float:
        """Move the schedule on; gives the rate that the step just taken used."""
        return self._training().advance()

    def settle_checkpoint(self) -> None:
        """Nothing, in an engine whose `save_checkpoint` returns when all is written."""

    def shutdown(self) -> None:
        """Drop model and optimizer. The process group is the worker's."""
        self._state = None

    @abstractmethod
    def initialize(self) -> None: ...

    @abstractmethod
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
        """See core.engine.Engine."""

    @abstractmethod
    def weight_specs(self) -> Sequence[WeightSpec]: ...

    @abstractmethod
    def export_weights(self, dst: Literal["all", "first"] = "all") -> Iterator[tuple[str, torch.Tensor]]: ...

    @abstractmethod
    def load_weights(self, stream: Iterator[tuple[str, torch.Tensor]]) -> None: ...

    @abstractmethod
    def _set_training(self, training: bool) -> bool:
        """Put the model into training or evaluation mode; gives the mode that it was in."""

    def _check_can_run(self) -> None:
        """Raises Refused where no pass can run as the engine is."""
        self._ready()

    def _ready(self) -> S:
        if self._state is None:
            raise Refused("the engine holds no model", mend="call initialize() first")
        return self._state

    def _training(self) -> Steps:
        optimizer = self._ready().optimizer
        if optimizer is None:
            raise Refused("the engine is not trainable", have="trainable=False", mend="set trainable=True")
        return optimizer

    def _check_pass(
        self,
        micro_batches: Sequence[TensorDict],
        loss_fn: LossFn | None,
        outputs: frozenset[str],
        *,
        temperature: float,
        forward_only: bool,
    ) -> frozenset[str]:
        """The outputs that the model must compute in a pass.

        Raises:
            Refused: alike on all ranks, before anything runs: an output that the engine doesn't have, a batch that
                isn't padded, lacks teacher_ids or has model inputs that the engine doesn't read, a temperature that
                isn't above 0, or training without a loss or of an engine that is not trainable.
        """
        where = f"{type(self).__name__}.forward_backward"
        self._check_can_run()
        needs = check_request(
            self._limits, loss_fn, outputs, temperature=temperature, forward_only=forward_only, where=where
        )
        if not forward_only:
            self._training()
        for batch in micro_batches:
            check_padded(batch, needs, where=where, inputs=self._inputs)
        return needs


Part = Literal["model", "optimizer", "grad"]


class OffloadEngineBase(EngineBase[S]):
    """An engine whose parameters and optimizer state can wait on the CPU. Meets core.engine.OffloadEngine.

    Args:
        mesh, limits, inputs: as EngineBase.
        device: where parameters live while they are used.
        parameters, optimizer: whether these are on CPU outside of the modes that need them.
    """

    _keeps_gradients_apart: ClassVar[bool] = False  # in memory of their own: they move, and are away, by themselves

    def __init__(
        self,
        mesh: RankMesh,
        limits: Limits,
        inputs: Collection[str] = (),
        *,
        device: torch.device,
        parameters: bool,
        optimizer: bool,
    ) -> None:
        super().__init__(mesh, limits, inputs)
        self._device = device
        self._offloads: dict[Part, bool] = {"model": parameters, "optimizer": optimizer, "grad": parameters}
        self._away: set[Part] = set()

    def _hold(self, state: S) -> None:
        """Begin with what `initialize` has built on the device, and send away what the options say."""
        self._state = state
        self._away.clear()
        self._send_away(self._offloads)

    @contextmanager
    def _mode(self, *, training: bool) -> Iterator[None]:
        # Load what is away, and send away again only that: a mode within a mode changes nothing for the outer one.
        need: dict[Part, bool] = {"model": True, "optimizer": training, "grad": training}
        loaded = {part: wanted and part in self._away for part, wanted in need.items()}
        self.to("device", model=loaded["model"], optimizer=loaded["optimizer"], grad=loaded["grad"])
        try:
            with super()._mode(training=training):
                yield
        finally:
            self._send_away({part: was_loaded and self._offloads[part] for part, was_loaded in loaded.items()})

    def _send_away(self, parts: Mapping[Part, bool]) -> None:
        self.to("cpu", model=parts["model"], optimizer=parts["optimizer"], grad=parts["grad"])

    def optimizer_step(self) -> StepInfo:
        """Collective. Raises Refused without gradients, or while parameters or optimizer state are on CPU."""
        self._training()
        self._check_on_device("model", "optimizer")
        return super().optimizer_step()

    def to(self, device: Literal["cpu", "device"], *, model: bool, optimizer: bool, grad: bool) -> None:
        """Move parameters and buffers, optimizer state, and gradients where the engine keeps them apart. Else gradients
        go with the parameters, whatever `grad` says."""
        trainable = self._ready().optimizer is not None
        parts: list[Part] = ["model"] if model else []
        if optimizer and trainable:
            parts.append("optimizer")
        if grad and trainable and self._keeps_gradients_apart:
            parts.append("grad")
        parts = [part for part in parts if (part in self._away) == (device == "device")]
        for part in parts:
            self._move(part, device)
        self._away = self._away - set(parts) if device == "device" else self._away | set(parts)
        if parts and device == "cpu":
            empty_caches(self._device)

    @abstractmethod
    def _move(self, part: Part, device: Literal["cpu", "device"]) -> None:
        """Move one part, which is on the other side."""

    def _check_can_run(self) -> None:
        """As EngineBase; also Refused for parameters that are on CPU."""
        super()._check_can_run()
        self._check_on_device("model")

    def _check_on_device(self, *parts: Part) -> None:
        if away := [part for part in parts if part in self._away]:
            raise Refused(
                f"{' and '.join(away)} {'are' if len(away) > 1 else 'is'} on CPU, sent there by to() or offload",
                mend="enter train_mode() or eval_mode(), or call to('device', ...)",
                where=type(self).__name__,
            )
