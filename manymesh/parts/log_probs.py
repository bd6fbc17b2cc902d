"""Log-probabilities and entropy of tokens without a softmax over the vocabulary kept for backward.

The vocabulary may be split over a process group (tensor parallelism): logits stay where they are, and only numbers of
one a token cross ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from core.errors import Refused

# Elements of fp32 scratch at a time: 64 MiB a temporary, whatever tokens x vocabulary is.
CHUNK_ELEMENTS = 2**24


def token_outputs(
    logits: torch.Tensor,
    input_ids: torch.Tensor,
    temperature: float = 1.0,
    *,
    entropy: bool = False,
    teacher_ids: torch.Tensor | None = None,
    group: Any = None,
    vocab_size: int | None = None,
) -> dict[str, torch.Tensor]:
    """Outputs aligned with `input_ids`: the value at position t belongs to token t, and position 0 is 0.

    Args:
        logits: (rows, tokens, vocabulary), any float dtype; with `group`, this rank's part of the vocabulary.
        input_ids: (rows, tokens), whole ids on every rank.
        teacher_ids: (rows, tokens, k); at position t, candidates for token t. Ids of the vocabulary everywhere, also at
            position 0 and in padding.
        temperature, entropy, group, vocab_size: see vocab_log_probs.

    Returns:
        `log_probs`, and `entropy` where asked for: (rows, tokens) fp32, the same on every rank of the group. With
        `teacher_ids` also `top_log_probs`, (rows, tokens, k).

    Raises:
        Refused: as vocab_log_probs.
    """
    targets = predicted_ids(input_ids, teacher_ids)
    log_probs, entropies = vocab_log_probs(
        logits.flatten(0, 1), targets.flatten(0, 1), temperature, entropy, group, vocab_size
    )
    outputs = named_outputs(log_probs.view(targets.shape), entropies)
    # The logits at t - 1 are of token t; what the last position predicts is nobody's.
    return {name: F.pad(value[:, :-1], (*[0, 0] * (value.ndim - 2), 1, 0)) for name, value in outputs.items()}


def predicted_ids(input_ids: torch.Tensor, teacher_ids: torch.Tensor | None = None) -> torch.Tensor:
    """Ids whose log-probabilities the logits of each position give: (rows, tokens, 1 + k), the token's own first."""
    ids = input_ids[..., None]
    return (ids if teacher_ids is None else torch.cat((ids, teacher_ids), -1)).roll(-1, dims=1)


def named_outputs(log_probs: torch.Tensor, entropy: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """What vocab_log_probs gave for predicted_ids, by output name. Log-probs are (rows, tokens, 1 + k)."""
    outputs = {"log_probs": log_probs[..., 0]}
    if log_probs.shape[-1] > 1:
        outputs["top_log_probs"] = log_probs[..., 1:]
    if entropy is not None:
        outputs["entropy"] = entropy.view(log_probs.shape[:-1])
    return outputs


def without_padding(outputs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Aligned outputs (rows, tokens, ...), 0 at position 0 and where `mask` (rows, tokens, bool) is not."""
    empty = ~mask
    empty[:, 0] = True
    return outputs.masked_fill(empty.view(*empty.shape, *[1] * (outputs.ndim - 2)), 0.0)


def unpacked(outputs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Outputs of all real tokens in row order, (tokens, ...), as (rows, tokens, ...), 0 in padding."""
    shape = (*mask.shape, *outputs.shape[1:])
    return outputs.new_zeros(shape).masked_scatter(mask.view(*mask.shape, *[1] * (outputs.ndim - 1)), outputs)


def vocab_log_probs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
    entropy: bool = False,
    group: Any = None,
    vocab_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probabilities of `targets[i]` under `logits[i]`, and entropy: no shift, for callers whose tokens are sliced.

    Collective over `group`, in forward alone: one MAX and one SUM all-reduce a call, of a few fp32 a token and id.
    Backward gives each rank the gradient of its own logits, and takes what comes in as the same on every rank.

    Args:
        logits: (tokens, vocabulary), any float dtype. With a group of size n, rank r holds the ids from
            r * vocabulary to (r + 1) * vocabulary - 1.
        targets: (tokens,), or (tokens, n) for several ids a token, which may repeat: ids of 0..vocab_size - 1, the same
            on every rank.
        temperature: above 0; both outputs are of softmax(logits / temperature).
        entropy: also give the entropy in nats.
        group: a ProcessGroup over which the vocabulary is split; None for whole logits.
        vocab_size: ids from here on are padding, which has no probability and gets no gradient. None: no padding.

    Returns:
        log-probabilities of the targets' shape, and entropies (tokens,) or None: fp32, the same on every rank of the
        group.

    Raises:
        Refused: shapes that don't fit each other, or a vocab_size that the logits cannot hold.
    """
    if logits.ndim != 2 or targets.ndim not in (1, 2) or logits.shape[0] != targets.shape[0]:
        raise Refused(
            "logits are (tokens, vocabulary) and targets (tokens,) or (tokens, n)",
            have={"logits": tuple(logits.shape), "targets": tuple(targets.shape)},
            where="vocab_log_probs",
        )
    size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    width = logits.shape[-1]
    if vocab_size is not None and not 0 < vocab_size <= size * width:
        raise Refused(
            "the vocabulary's size doesn't fit the logits",
            have=f"vocab_size={vocab_size}, {size} ranks with {width} logits a token",
            want=f"1..{size * width}",
            where="vocab_log_probs",
        )
    first = rank * width
    whole = size * width if vocab_size is None else vocab_size
    columns, here = targets, None
    if size > 1 or whole < width:
        # gather sees no such id then. Nor is the device waited for: on CUDA this comes up at a later synchronisation.
        torch._assert_async(((targets >= 0) & (targets < whole)).all(), f"a token's id is not in 0..{whole - 1}")
    own = min(max(whole - first, 0), width)
    if size > 1:
        here = (targets >= first) & (targets < first + own)
        columns = torch.where(here, targets - first, 0)
    if columns.ndim == 1:
        columns, here = columns[:, None], None if here is None else here[:, None]
    log_probs, entropies = _VocabLogProbs.apply(logits, columns, here, temperature, entropy, group, own)
    return log_probs.view(targets.shape), entropies


class _VocabLogProbs(torch.autograd.Function):
    """(tokens, vocabulary) logits to (tokens, n) log-probabilities and (tokens,) entropies.

    Of the logits the first `own` columns are ids. `columns` (tokens, n) says where the targets are among them; `here`,
    where the vocabulary is split, which of them are, and the others' columns are any.

    Autograd through log_softmax keeps fp32 tokens x vocabulary for backward, and entropy two more. This keeps the
    logits, which the model has made anyway, and a few numbers a token; backward makes the softmax again, by chunks.

    With s_i = (logit_i - maximum) / temperature, e_i = exp(s_i), Z = sum e_i and p_i = e_i / Z:
        log p_i = s_i - log Z                   d log p_k / d s_i = [i is k] - p_i
        entropy = log Z - sum(e_i s_i) / Z      d entropy / d s_i = -p_i (log p_i + entropy)
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        columns: torch.Tensor,
        here: torch.Tensor | None,
        temperature: float,
        with_entropy: bool,
        group: Any,
        own: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        local = logits[:, :own]
        maximum = local.amax(-1).float() if own else logits.new_full(columns.shape[:1], -torch.inf, dtype=torch.float32)
        if here is not None:
            dist.all_reduce(maximum, dist.ReduceOp.MAX, group)
        # Z, sum(e s), and s of each target; 0 where this rank holds nothing of them.
        tokens, num_targets = columns.shape
        sums = torch.zeros((2 + num_targets, tokens), dtype=torch.float32, device=logits.device)
        for part in _chunks(local):
            shifted = _shifted(local[part], maximum[part], temperature)
            sums[2:, part] = shifted.gather(-1, columns[part]).t()
            powers = shifted.exp() if with_entropy else shifted.exp_()
            sums[0, part] = powers.sum(-1)
            if with_entropy:
                sums[1, part] = _weighted(shifted, powers).sum(-1)
        if here is not None:
            sums[2:].masked_fill_(~here.t(), 0.0)
            dist.all_reduce(sums, dist.ReduceOp.SUM, group)
        total, log_total = sums[0], sums[0].log()
        log_probs = (sums[2:] - log_total).t().contiguous()
        entropy = log_total - sums[1] / total if with_entropy else None
        ctx.save_for_backward(logits, columns, here, maximum, total, entropy)
        ctx.temperature, ctx.own = temperature, own
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_log_probs: torch.Tensor | None, of_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None, None, None, None, None, None]:
        logits, columns, here, maximum, total, entropy = ctx.saved_tensors
        if of_log_probs is None and of_entropy is None:
            return (None,) * 7
        # What e_i, e_i s_i and [i is k] are multiplied by.
        scale = 1 / ctx.temperature
        by_power, by_weighted, by_target = torch.zeros_like(total), None, None
        if of_log_probs is not None:
            by_power -= of_log_probs.sum(-1)
            by_target = of_log_probs * scale
            if here is not None:
                by_target = by_target.masked_fill(~here, 0.0)
        if of_entropy is not None:
            by_power -= of_entropy * (entropy - total.log())
            by_weighted = of_entropy * -scale / total
        by_power *= scale / total
        gradient = torch.empty_like(logits)
        if ctx.own < logits.shape[-1]:
            gradient[:, ctx.own :] = 0
        for part in _chunks(logits[:, : ctx.own]):
            shifted = _shifted(logits[part, : ctx.own], maximum[part], ctx.temperature)
            if by_weighted is None:
                slope = shifted.exp_().mul_(by_power[part, None])
            else:
                powers = shifted.exp()
                slope = _weighted(shifted, powers).mul_(by_weighted[part, None])
                slope.addcmul_(powers, by_power[part, None])
            if by_target is not None:
                slope.scatter_add_(-1, columns[part], by_target[part])
            gradient[part, : ctx.own] = slope
        return gradient, None, None, None, None, None, None


def _chunks(logits: torch.Tensor) -> list[slice]:
    """Of rows; none where this rank's part of the vocabulary is all padding."""
    if not logits.shape[-1]:
        return []
    step = max(1, CHUNK_ELEMENTS // logits.shape[-1])
    return [slice(start, start + step) for start in range(0, logits.shape[0], step)]


def _shifted(logits: torch.Tensor, maximum: torch.Tensor, temperature: float) -> torch.Tensor:
    """s, in fp32 scratch. Taking the maximum off first leaves no more error than the logits themselves have."""
    offset = maximum[:, None]
    shifted = logits - offset if logits.dtype == torch.float32 else logits.float().sub_(offset)
    return shifted.div_(temperature) if temperature != 1 else shifted


def _weighted(shifted: torch.Tensor, powers: torch.Tensor) -> torch.Tensor:
    """e s, in the memory of s. 0 where s is -inf, as for masked vocabulary."""
    return shifted.clamp_(min=torch.finfo(torch.float32).min).mul_(powers)
