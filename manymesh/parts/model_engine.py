"""What engines have in common whose ranks hold one transformers model each, whole or sharded: modes, outputs, weights,
checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from tensordict import TensorDict

from core.engine import WeightSpec
from manymesh.parts.engine_base import EngineBase, Steps
from manymesh.parts.engine_checkpoint import TorchCheckpointer
from manymesh.parts.log_probs import token_outputs, unpacked, without_padding


class SavedWeights(Protocol):
    """A model's weights by the names that save_pretrained writes, such as manymesh.parts.live_weights.WeightTable."""

    def specs(self) -> Sequence[WeightSpec]: ...
    def load(self, stream: Iterator[tuple[str, torch.Tensor]]) -> None: ...


class ModelState(Protocol):
    """What `initialize` builds. `optimizer` is None where the engine is not trainable."""

    @property
    def model(self) -> Any: ...
    @property
    def weights(self) -> SavedWeights: ...
    @property
    def optimizer(self) -> Steps | None: ...


S = TypeVar("S", bound=ModelState)


class ModelEngine(EngineBase[S]):
    """An engine without `initialize`, `forward_backward` and `export_weights`. Meets core.engine.CheckpointEngine.

    A subclass's constructor sets `_checkpointer`.
    """

    _checkpointer: TorchCheckpointer

    def _set_training(self, training: bool) -> bool:
        model = self._ready().model
        before = bool(model.training)
        model.train(training)
        return before

    def weight_specs(self) -> Sequence[WeightSpec]:
        return self._ready().weights.specs()

    def load_weights(self, stream: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Full tensors by the names of weight_specs, the same on every rank.

        Raises:
            Refused: an unknown or doubled name or a wrong shape, at once; missing names, at the end. What came
                before is loaded then.
        """
        self._ready().weights.load(stream)

    def save_checkpoint(self, path: str, *, step: int) -> None:
        """Collective; see TorchCheckpointer.save."""
        state = self._ready()
        self._checkpointer.save(path, state.model, state.optimizer, step)

    def load_checkpoint(self, path: str) -> int:
        """Collective; see TorchCheckpointer.load."""
        state = self._ready()
        return self._checkpointer.load(path, state.model, state.optimizer)


def model_outputs(
    model: Any, batch: TensorDict, needs: frozenset[str], temperature: float, *, packed: bool = False
) -> dict[str, torch.Tensor]:
    """These outputs of a causal language model, padded (rows, tokens) fp32, 0 at position 0 and in padding.

    Args:
        model: of transformers, or what wraps one.
        batch: a padded micro-batch, on the model's device.
        needs: "log_probs", "entropy" or "top_log_probs"; the last are (rows, tokens, k).
        packed: the model gets one row of all tokens, without padding.
    """
    if not needs:
        return {}
    ids, mask = batch["input_ids"], batch["attention_mask"].bool()
    teacher_ids = batch["teacher_ids"] if "top_log_probs" in needs else None
    positions = {}
    if packed:
        # One row of all tokens, told apart by positions that begin at 0 again. transformers does so only without a
        # mask and without a cache: with either, rows attend to each other.
        positions = {"position_ids": torch.arange(ids.shape[1], device=ids.device).expand_as(ids)[mask][None]}
        ids = ids[mask][None]
        teacher_ids = teacher_ids[mask][None] if teacher_ids is not None else None
    # No mask: padding stands on the right, where a causal model's real tokens don't look.
    logits = model(input_ids=ids, use_cache=False, **positions).logits
    values = token_outputs(logits, ids, temperature, entropy="entropy" in needs, teacher_ids=teacher_ids)
    if packed:
        values = {name: unpacked(value[0], mask) for name, value in values.items()}
    return {name: without_padding(value, mask) for name, value in values.items() if name in needs}
