"""What a forward and backward pass through a decoder takes beside its parameters and gradients. No torch."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from manymesh.parts.decoder_shape import DecoderShape, Layer

SCRATCH = 2 * 2**24 * 4  # bytes of manymesh.parts.log_probs: two fp32 temporaries of a chunk of logits


@attrs.frozen
class PassMemory:
    """Bytes of one micro-batch on one rank.

    Attributes:
        kept: by all layers for backward, at the end of forward.
        working: of the layer that is being computed, forward or backward.
        logits: with the scratch of log-probabilities.
        logits_gradient: what backward has of them beside.
    """

    kept: int
    working: int
    logits: int
    logits_gradient: int

    @classmethod
    def of(
        cls,
        shape: DecoderShape,
        tokens: int,
        num_bytes: int,
        *,
        layers: Sequence[Layer] | None = None,
        recomputed: int = 0,
        tensor_parallel: int = 1,
        sequence_parallel: bool = False,
    ) -> PassMemory:
        """Of layers in transformers' form, with log-probabilities of manymesh.parts.log_probs.

        Args:
            tokens: of the micro-batch, padding included, on this rank.
            num_bytes: of a number of the computation's dtype.
            layers: of this rank; None for all.
            recomputed: of so many layers only the first one's input is kept; backward makes the rest again. 0: none.
        """
        layers = shape.layers if layers is None else layers
        tp, sp = tensor_parallel, sequence_parallel
        by_layer = [shape.kept(layer, num_bytes, tp, sequence_parallel=sp) for layer in layers]
        working = max((shape.working(layer, num_bytes, tp) for layer in layers), default=0)
        if recomputed:
            working += recomputed * max(by_layer, default=0)
            by_layer = [num_bytes * shape.hidden // (tp if sp else 1)] * -(-len(layers) // recomputed)
        # The last norm, its product, and the embedding's output, which the first layer's residual is.
        outside = shape.hidden * (4 + 3 * num_bytes) // (tp if sp else 1)
        logits = tokens * shape.vocab // tp * num_bytes
        scratch = min(SCRATCH, 2 * tokens * shape.vocab // tp * 4)
        return cls(tokens * (sum(by_layer) + outside), tokens * working, logits + scratch, logits)

    @property
    def forward_only(self) -> int:
        """The worst moment without backward."""
        return max(self.working, self.logits)

    @property
    def turning(self) -> int:
        """Where forward ends and backward begins: all is kept, and logits have their gradient."""
        return self.kept + self.logits + self.logits_gradient
