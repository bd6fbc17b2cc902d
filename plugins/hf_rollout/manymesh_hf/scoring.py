"""Log-probabilities of given rows by a transformers model, in steps whose logits take a bounded amount of memory."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from core.batch import flat

LOGITS = 2**27  # elements of one step: 512 MiB in fp32


@torch.no_grad()
def score(
    model: Any, ids: torch.Tensor, vocab_size: int, temperature: float, top_k: int, *, elements: int = LOGITS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Score jagged rows, each token behind those before it.

    Rows run together while their logits are of at most so many elements. A longer row runs alone, so many tokens a
    step, with a cache of those before.

    Returns:
        log-probabilities fp32 (tokens), and ids and log-probabilities of the most likely, (tokens, top_k); 0 on the
        first token of each row.
    """
    tokens, offsets = flat(ids)
    device = next(model.parameters()).device
    log_probs = torch.zeros(len(tokens), device=device)
    top_ids = torch.zeros(len(tokens), top_k, dtype=torch.int64, device=device)
    top_log_probs = torch.zeros(len(tokens), top_k, device=device)
    per_step = max(elements // vocab_size, 1)
    bounds = offsets.tolist()
    for rows in _groups(offsets.diff().tolist(), per_step):
        texts = [tokens[bounds[row] : bounds[row + 1]] for row in rows]
        lengths = torch.tensor([len(text) for text in texts], device=device)
        padded = pad_sequence(texts, batch_first=True).to(device)
        firsts = offsets[torch.tensor(rows, device=offsets.device)].to(device)
        for start, logits in _steps(model, padded, lengths, max(per_step // len(rows), 1)):
            # Logits at position t are of token t + 1.
            at = torch.arange(start + 1, start + 1 + logits.shape[1], device=device)
            real = at < lengths[:, None]
            values = logits[real].float().div_(temperature)
            norm = values.logsumexp(-1, keepdim=True)
            targets = padded.roll(-1, 1)[:, start : start + logits.shape[1]][real]
            place = (firsts[:, None] + at)[real]
            log_probs[place] = (values.gather(1, targets[:, None]) - norm)[:, 0]
            if top_k:
                best = values.topk(top_k)
                top_ids[place], top_log_probs[place] = best.indices, best.values - norm
    return log_probs, top_ids, top_log_probs


def _groups(lengths: list[int], per_step: int) -> Iterator[list[int]]:
    """Rows of like length together, longest first, padded to at most per_step tokens."""
    group: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if group and lengths[group[0]] * (len(group) + 1) > per_step:
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def _steps(model: Any, padded: torch.Tensor, lengths: torch.Tensor, step: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(first position, logits) of right-padded rows, `step` positions at a time."""
    width = padded.shape[1]
    mask = torch.arange(width, device=padded.device) < lengths[:, None]
    if step >= width:
        yield 0, model(input_ids=padded, attention_mask=mask, use_cache=False).logits
        return
    # Newer versions of transformers have renamed the argument.
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    past = {name: DynamicCache(config=model.config)}
    for start in range(0, width, step):
        end = min(start + step, width)
        yield (
            start,
            model(input_ids=padded[:, start:end], attention_mask=mask[:, :end], use_cache=True, **past).logits,
        )
