"""Batches of a rollout: prompts and sequences in the one form that engines read, and the answered rows of generate."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

import torch
from tensordict import TensorDict, TensorDictBase

from core.batch import (
    columns,
    contiguous,
    flat,
    is_jagged,
    jagged_from,
    nested,
    num_rows,
    object_column,
    select,
    with_metadata,
)
from core.columns import check_model_inputs, model_inputs
from core.errors import Refused
from core.rollout import LogProbKind, SamplingParams


def token_ids(batch: TensorDictBase, name: str) -> torch.Tensor:
    """A column of token ids as int64 (rows, tokens), jagged and contiguous.

    Args:
        name: of a column that is jagged, or padded on either side with `attention_mask`, or of rows of one length.

    Raises:
        Refused: there is no such column, it has another form, or a row is empty.
    """
    ids = batch.get(name, None)
    if ids is None:
        raise Refused(f"the batch has no {name}", have=sorted(batch.keys()), want=f"a column {name} (rows, tokens)")
    if is_jagged(ids):
        values, offsets = flat(contiguous(ids))
    else:
        mask = batch.get("attention_mask", None)
        mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        if ids.dim() != 2 or mask.shape != ids.shape:
            raise Refused(
                f"{name} has another shape than its mask",
                have=f"{name} {tuple(ids.shape)}, attention_mask {tuple(mask.shape)}",
                want="(rows, tokens) both",
            )
        values, offsets = flat(jagged_from(ids[mask], mask.sum(1)))
    if values.dim() != 1 or values.is_floating_point():
        raise Refused(f"{name} holds token ids", have=values.dtype, want="int64 (rows, tokens)")
    empty = (offsets.diff() == 0).nonzero().flatten().tolist()
    if empty:
        raise Refused(f"rows of {name} are empty", have=f"rows {empty[:20]}", want="at least one token each")
    return nested(values.long(), offsets)


def check_vocabulary(ids: torch.Tensor, vocab_size: int, row_name: str) -> None:
    """Raises Refused where a token of a jagged column is not in the vocabulary, with the first such row's number."""
    tokens, offsets = flat(ids)
    if not len(tokens):
        return
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        first = ((tokens < 0) | (tokens >= vocab_size)).nonzero()[0]
        row = int(torch.searchsorted(offsets[1:], first, right=True))
        raise Refused(
            f"{row_name} {row} has a token that the model doesn't know",
            have=f"ids {low}..{high}",
            want=f"0..{vocab_size - 1}",
            mend="use the model's own tokenizer",
        )


def token_lists(ids: torch.Tensor) -> list[list[int]]:
    """The rows of a jagged column, as engines that speak in lists take them."""
    values, offsets = flat(ids)
    tokens, bounds = values.tolist(), offsets.tolist()
    return [tokens[start:stop] for start, stop in pairwise(bounds)]


def read_prompts(batch: TensorDict, *, inputs: Collection[str] = (), backend: str = "the rollout") -> TensorDict:
    """What a rollout reads of a batch, in one form.

    Args:
        inputs: model inputs that the backend reads, as its manifest names them.
        backend: how an error calls it.

    Returns:
        `prompt_ids` (rows, tokens) int64, jagged; `prompt_id` (rows), the rows' numbers where the batch has none;
        `row_weight` (rows), ones where it has none; and the model inputs.

    Raises:
        Refused: as token_ids; model inputs that the backend doesn't read.
    """
    check_model_inputs(batch.keys(), inputs, backend)
    ids = token_ids(batch, "prompt_ids")
    device, rows = ids.device, num_rows(batch)
    prompt_id, row_weight = batch.get("prompt_id", None), batch.get("row_weight", None)
    out = TensorDict({}, batch_size=[rows])
    out.set("prompt_ids", ids)
    out.set("prompt_id", torch.arange(rows, device=device) if prompt_id is None else prompt_id.long())
    out.set("row_weight", torch.ones(rows, device=device) if row_weight is None else row_weight.float())
    for name in model_inputs(batch.keys()):
        out.set(name, batch.get(name))
    return out


def check_prompts(prompts: TensorDict, vocab_size: int, context: int | None, max_new_tokens: int) -> None:
    """Raises Refused where a token is not in the vocabulary, or prompt and response don't fit the context."""
    if not len(prompts):
        return
    check_vocabulary(prompts["prompt_ids"], vocab_size, "prompt")
    lengths = flat(prompts["prompt_ids"])[1].diff()
    longest = int(lengths.max())
    if context is not None and longest + max_new_tokens > context:
        raise Refused(
            f"prompt {int(lengths.argmax())} leaves no room for its response",
            have=f"{longest} tokens and max_new_tokens {max_new_tokens}",
            want=f"at most {context} together, the model's context",
            mend=f"cut prompts to {max(context - max_new_tokens, 0)} tokens, or lower max_new_tokens",
        )


def repeat_samples(prompts: TensorDict, num_samples: int) -> tuple[TensorDict, torch.Tensor]:
    """Each prompt num_samples times, standing together, and int64 (rows): each row's number among those of its
    prompt."""
    rows = torch.arange(len(prompts)).repeat_interleave(num_samples)
    return select(prompts, rows), torch.arange(num_samples).repeat(len(prompts))


def answer(
    prompts: TensorDict,
    tokens: Sequence[Sequence[int]],
    log_probs: Sequence[Sequence[float]],
    finish_reasons: Sequence[str],
    *,
    sampling: SamplingParams,
    weight_version: int,
) -> TensorDict:
    """The answer of generate, from what an engine that speaks in lists has sampled behind each prompt.

    Args:
        prompts: of read_prompts, a row for each response.
        tokens, log_probs, finish_reasons: by row.
    """
    ids, offsets = (each.cpu() for each in flat(prompts["prompt_ids"]))
    response_lengths = torch.tensor([len(row) for row in tokens], dtype=torch.int64)
    lengths = offsets.diff() + response_lengths
    ends = lengths.cumsum(0)
    at = torch.arange(int(lengths.sum()))
    mask = at >= (ends - response_lengths).repeat_interleave(lengths)
    input_ids = torch.empty(len(at), dtype=torch.int64)
    input_ids[~mask] = ids
    input_ids[mask] = torch.tensor([token for row in tokens for token in row], dtype=torch.int64)
    values = torch.zeros(len(at))
    values[mask] = torch.tensor([value for row in log_probs for value in row], dtype=torch.float32)
    rows = response_rows(input_ids, mask, values, lengths, finish_reasons)
    return answer_of_rows(prompts, rows, sampling=sampling, weight_version=weight_version)


def response_rows(
    input_ids: torch.Tensor,
    response_mask: torch.Tensor,
    log_probs: torch.Tensor,
    lengths: torch.Tensor,
    finish_reasons: Sequence[str],
) -> TensorDict:
    """Rows as an engine gives them, for `answer_of_rows`; several batches of them are joined by core.batch.concat.

    Args:
        input_ids, response_mask, log_probs: (tokens) of prompts and responses in row order; log_probs 0 on prompts.
        lengths: int64 (rows).
        finish_reasons: "stop", "length" or "abort", by row.
    """
    out = TensorDict({}, batch_size=[len(lengths)])
    ids = jagged_from(input_ids, lengths)
    out.set("input_ids", ids)
    out.set("response_mask", nested(response_mask, flat(ids)[1]))
    out.set("rollout_log_probs", nested(log_probs, flat(ids)[1]))
    return out.set("finish_reason", object_column(list(finish_reasons)))


def no_responses() -> TensorDict:
    """`response_rows` of no row."""
    empty = torch.zeros(0, dtype=torch.int64)
    return response_rows(empty, empty.bool(), empty.float(), empty, ())


def answer_of_rows(
    prompts: TensorDict, rows: TensorDict, *, sampling: SamplingParams, weight_version: int
) -> TensorDict:
    """The answer of generate (core.columns.GENERATED), on the prompts' device; token columns share their offsets.

    Its metadata `rollout_temperature` is 1 where the rows are greedy, whose log-probs they have.

    Args:
        prompts: of read_prompts, a row for each of `rows`.
        rows: of response_rows, in the same order.
    """
    device = prompts["prompt_ids"].device
    offsets = flat(rows["input_ids"])[1].to(device)
    out = TensorDict({}, batch_size=[len(prompts)])
    for name, column in columns(rows).items():
        out.set(name, nested(flat(column)[0].to(device), offsets) if is_jagged(column) else column)
    out.set("prompt_id", prompts["prompt_id"])
    out.set("weight_version", torch.full((len(prompts),), weight_version, dtype=torch.int64, device=device))
    out.set("row_weight", prompts["row_weight"])
    for name in model_inputs(prompts.keys()):
        out.set(name, prompts.get(name))
    kind = LogProbKind(sampling.log_probs).value
    return with_metadata(out, rollout_temperature=sampling.temperature or 1.0, log_prob_kind=kind)
