"""The contract of training backends: Engine, what it may offer, and the values that it exchanges with workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import attrs

from core.loss import LossFn, LossScale, Metric
from core.manifest import Capability, Limits
from core.mesh import Mesh

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict


@attrs.frozen
class MicroResult:
    """What a micro-batch gave: the requested outputs, padded (rows, tokens) and detached, and metrics."""

    outputs: TensorDict | None
    metrics: Mapping[str, Metric]


@attrs.frozen
class StepInfo:
    grad_norm: float  # before clipping
    skipped: bool  # gradients were not finite: nothing was changed


@attrs.frozen
class WeightSpec:
    """One tensor of a model as save_pretrained writes it (Qwen3-MoE: one name an expert, not the fused parameter)."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # "float32", "bfloat16"
    together: str | None = None  # specs with one value load in one go (q, k, v; gate, up)


@runtime_checkable
class Engine(Protocol):
    """A training backend on one rank.

    Workers plan micro-batches, set the scale, join metrics and restore row order; the engine owns forward, backward,
    accumulation without needless synchronisation, pipeline schedule and optimizer. What only some engines offer has a
    protocol of its own; see OPTIONAL.
    """

    @property
    def mesh(self) -> Mesh: ...
    @property
    def limits(self) -> Limits: ...

    def initialize(self) -> None: ...

    def train_mode(self) -> AbstractContextManager[None]: ...
    def eval_mode(self) -> AbstractContextManager[None]:
        """Both modes load and offload as configured."""
        ...

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
        """Run padded micro-batches, the same number on every rank.

        Log-probs and entropy are of softmax(logits / temperature), the temperature above 0. Values don't depend on it.

        Afterwards the gradient is the plain SUM of the shares over all micro-batches and dp ranks, each token once: the
        engine undoes FSDP's averaging, Megatron's 1/num_microbatches, and factors of cp, sp or dp. Results on every
        rank of the last pipeline stage, None elsewhere. When training, outputs are dropped micro-batch by micro-batch.
        """
        ...

    def optimizer_zero_grad(self) -> None: ...
    def optimizer_step(self) -> StepInfo: ...
    def lr_scheduler_step(self) -> float:
        """Move the schedule on; gives the learning rate that the step just taken used."""
        ...

    def weight_specs(self) -> Sequence[WeightSpec]: ...
    def export_weights(self, dst: Literal["all", "first"] = "all") -> Iterator[tuple[str, torch.Tensor]]:
        """Collective: every rank iterates to the end. Full tensors one at a time, in the order of weight_specs; on
        ranks that dst leaves out, the tensor is empty."""
        ...

    def load_weights(self, stream: Iterator[tuple[str, torch.Tensor]]) -> None: ...

    def shutdown(self) -> None: ...


@runtime_checkable
class OffloadEngine(Protocol):
    """An engine with the capability "offload": its state can wait on the CPU."""

    def to(self, device: Literal["cpu", "device"], *, model: bool, optimizer: bool, grad: bool) -> None: ...


@runtime_checkable
class CheckpointEngine(Protocol):
    """An engine with the capability "checkpoint"."""

    def save_checkpoint(self, path: str, *, step: int) -> None:
        """Collective. Refused on all ranks when any rank cannot write; then `path` does not exist afterwards."""
        ...

    def load_checkpoint(self, path: str) -> int:
        """Collective. Returns the step. Refused, with nothing changed, when it is of another model."""
        ...

    def settle_checkpoint(self) -> None:
        """Collective. Wait until all that was saved is whole, under its name: of engines that write in the background.
        Refused on all ranks where it could not be written."""


@runtime_checkable
class AdapterEngine(Protocol):
    """An engine with the capability "adapter": what it trains is an adapter. `export_weights` then merges it."""

    def adapter_specs(self) -> Sequence[WeightSpec]: ...
    def export_adapter(self, dst: Literal["all", "first"] = "all") -> Iterator[tuple[str, torch.Tensor]]:
        """Collective, as Engine.export_weights, of the adapter's own tensors in the order of adapter_specs."""
        ...

    def adapter_disabled(self) -> AbstractContextManager[None]:
        """The reference policy without a second model."""
        ...


OPTIONAL: Mapping[Capability, type] = {
    Capability.OFFLOAD: OffloadEngine,
    Capability.CHECKPOINT: CheckpointEngine,
    Capability.ADAPTER: AdapterEngine,
}
"""The protocol of each capability. An engine that doesn't offer one doesn't have its methods."""
