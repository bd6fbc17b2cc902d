"""What an engine holds between `initialize` and `shutdown`."""

from __future__ import annotations

from typing import Any

import attrs
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from manymesh_megatron.optimizer import ScheduledOptimizer
from manymesh_megatron.weights import MegatronWeights


@attrs.define
class MegatronState:
    """A rank's part of the model, and its optimizer."""

    models: list[GPTModel]  # this rank's stages, in virtual order
    chunks: list[Any]  # the same in megatron's DDP, where the engine is trainable
    transformer: TransformerConfig
    weights: MegatronWeights
    optimizer: ScheduledOptimizer | None
    has_gradients: bool = False
