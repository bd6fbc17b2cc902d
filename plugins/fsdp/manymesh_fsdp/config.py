"""Options of the FSDP2 engine. Light: listing and planning import this, so no torch."""

from __future__ import annotations

from typing import Literal

import attrs

from core.config import EngineConfig

Dtype = Literal["float32", "bfloat16", "float16"]


@attrs.frozen
class FsdpConfig(EngineConfig):
    """EngineConfig, and what `fully_shard` and transformers can vary.

    With `dtype="float32"` and `compute_dtype="bfloat16"` the optimizer works on fp32 parameters while forward and
    backward run in bf16; gradients are then summed over micro-batches and ranks in `reduce_dtype`.
    """

    compute_dtype: Dtype | None = None  # of forward and backward; None: as dtype
    reduce_dtype: Dtype | None = None  # of gradient sums over micro-batches and ranks; None: as dtype
    reshard_after_forward: bool = True  # free a layer's full parameters until its backward, for a second all-gather
    gradient_checkpointing: bool = False  # recompute each decoder layer in backward
    attn_implementation: str | None = None  # of transformers: "sdpa", "eager", "flash_attention_2"; None: its choice
    packing: bool | None = None  # run rows without padding; None: with flash attention, where it is cheap
    offload_parameters: bool = False  # parameters and gradients on CPU outside of train_mode and eval_mode
    offload_optimizer: bool = False  # optimizer state on CPU outside of train_mode

    @property
    def packed(self) -> bool:
        """Whether rows are run without padding between them."""
        return self.flash_attention if self.packing is None else self.packing

    @property
    def flash_attention(self) -> bool:
        """Whether the attention takes sequence boundaries instead of a mask of tokens x tokens."""
        return "flash" in (self.attn_implementation or "")
