"""Options of the FSDP2 engine. Light: listing and planning import this, so no torch."""

from __future__ import annotations

from typing import Literal, Self

import attrs

from core.config import EngineConfig

ComputeDtype = Literal["float32", "bfloat16", "float16"]


@attrs.frozen
class FsdpConfig(EngineConfig):
    """EngineConfig, and what `fully_shard` and transformers can vary.

    With `dtype="float32"` and `compute_dtype="bfloat16"` the optimizer works on fp32 parameters while forward and
    backward run in bf16; gradients are then summed over micro-batches and ranks in `reduce_dtype`. That is what
    `dtype="auto"` means on GPUs.
    """

    compute_dtype: ComputeDtype | None = None  # of forward and backward; None: as dtype, with auto bfloat16 on GPUs
    reduce_dtype: ComputeDtype | None = None  # of gradient sums over micro-batches and ranks; None: as dtype
    reshard_after_forward: bool = True  # free a layer's full parameters until its backward, for a second all-gather
    gradient_checkpointing: bool = False  # recompute each decoder layer in backward
    attn_implementation: str | None = None  # of transformers: "sdpa", "eager", "flash_attention_2"; None: its choice
    packing: bool | None = None  # run rows without padding; None: with flash attention, where it is cheap
    offload_parameters: bool = False  # parameters and gradients on CPU outside of train_mode and eval_mode
    offload_optimizer: bool = False  # optimizer state on CPU outside of train_mode

    def on(self, device: str) -> Self:
        """As EngineConfig.on. "auto" is float32 on CPU. Elsewhere forward and backward run in bfloat16: of float32
        parameters where these are trained, else of bfloat16 ones."""
        if self.dtype != "auto":
            return self
        if device == "cpu":
            return attrs.evolve(self, dtype="float32")
        dtype: ComputeDtype = "float32" if self.trainable else "bfloat16"
        return attrs.evolve(self, dtype=dtype, compute_dtype=self.compute_dtype or "bfloat16")

    @property
    def packed(self) -> bool:
        """Whether rows are run without padding between them."""
        return self.flash_attention if self.packing is None else self.packing

    @property
    def flash_attention(self) -> bool:
        """Whether the attention takes sequence boundaries instead of a mask of tokens x tokens."""
        return "flash" in (self.attn_implementation or "")
