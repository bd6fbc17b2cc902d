"""Log-probabilities and entropy of tokens without a softmax over the vocabulary kept for backward."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

# Elements of fp32 scratch at a time: 64 MiB a temporary, whatever tokens x vocabulary is.
CHUNK_ELEMENTS = 2**24


def token_outputs(
    logits: torch.Tensor, input_ids: torch.Tensor, temperature: float = 1.0, *, entropy: bool = False
) -> dict[str, torch.Tensor]:
    """Outputs aligned with `input_ids`: the value at position t belongs to token t, and position 0 is 0.

    Args:
        logits: (rows, tokens, vocabulary), any float dtype.
        input_ids: (rows, tokens).
        temperature: both outputs are of softmax(logits / temperature).
        entropy: also give the entropy (nats) of the distribution that token t was drawn from.

    Returns:
        `log_probs`, and `entropy` where asked for: (rows, tokens) fp32.
    """
    targets = input_ids.roll(-1, dims=1)
    flat = _TokenOutputs.apply(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), temperature, entropy)
    names = ("log_probs", "entropy") if entropy else ("log_probs",)
    # The logits at t - 1 are of token t; what the last position predicts is nobody's.
    return {name: F.pad(value.view_as(input_ids)[:, :-1], (1, 0)) for name, value in zip(names, flat, strict=False)}


class _TokenOutputs(torch.autograd.Function):
    """(tokens, vocabulary) logits to (tokens,) log-probabilities and entropies.

    Autograd through log_softmax keeps fp32 tokens x vocabulary for backward, and entropy two more. This keeps the
    logits, which the model has made anyway, and one number a token; backward makes the softmax again, by chunks.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperature: float, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        normalizer = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
        log_probs = torch.empty_like(normalizer)
        entropy = torch.empty_like(normalizer) if with_entropy else None
        for part in _chunks(logits):
            scaled = _scaled(logits[part], temperature)
            normalizer[part] = scaled.logsumexp(-1)
            log_probs[part] = scaled.gather(-1, targets[part, None]).squeeze(-1) - normalizer[part]
            if entropy is not None:
                probs = (scaled - normalizer[part, None]).exp_()
                entropy[part] = torch.special.entr(probs).sum(-1)  # 0 where p is 0, as for masked vocabulary
        ctx.save_for_backward(logits, targets, normalizer, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_log_probs: torch.Tensor | None, of_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None, None, None]:
        logits, targets, normalizer, entropy = ctx.saved_tensors
        if of_log_probs is None and of_entropy is None:
            return None, None, None, None
        gradient = torch.empty_like(logits)
        for part in _chunks(logits):
            probs = (_scaled(logits[part], ctx.temperature) - normalizer[part, None]).exp_()
            by_scaled = torch.zeros_like(probs) if of_log_probs is None else probs * -of_log_probs[part, None]
            if of_log_probs is not None:
                by_scaled.scatter_add_(-1, targets[part, None], of_log_probs[part, None])
            if of_entropy is not None:
                # d entropy / d scaled_i = -p_i (log p_i + entropy)
                slope = torch.special.entr(probs).sub_(probs.mul_(entropy[part, None]))
                by_scaled.addcmul_(slope, of_entropy[part, None])
            gradient[part] = by_scaled.div_(ctx.temperature) if ctx.temperature != 1 else by_scaled
        return gradient, None, None, None


def _chunks(logits: torch.Tensor) -> list[slice]:
    step = max(1, CHUNK_ELEMENTS // logits.shape[-1])
    return [slice(start, start + step) for start in range(0, logits.shape[0], step)]


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return logits.float() / temperature if temperature != 1 else logits.float()
