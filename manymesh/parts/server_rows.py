"""Requests and rows of a rollout that is a server: one prompt of a submit, and the batch that many answers make."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from tensordict import TensorDict

from core.batch import jagged, object_column
from core.errors import Refused
from core.rollout import GenerationDelta, SamplingParams
from manymesh.parts.rollout_rows import answer, read_prompts


def one_prompt(prompt_ids: Sequence[int], sampling: SamplingParams, prompt_id: int) -> TensorDict:
    """A submit's prompt, as read_prompts has them: one row.

    Raises:
        Refused: it is empty, or num_samples is not 1.
    """
    if sampling.num_samples != 1:
        raise Refused(
            "a request is one response",
            have=f"num_samples {sampling.num_samples}",
            want="1",
            mend="submit once a sample, with its number as `sample`",
        )
    if not len(prompt_ids):
        raise Refused("a prompt is empty", want="at least one token")
    batch = TensorDict({"prompt_id": torch.tensor([prompt_id])}, batch_size=[1])
    return read_prompts(batch.set("prompt_ids", jagged([torch.tensor(list(prompt_ids))])))


def server_batch(
    prompts: TensorDict, answers: Sequence[Sequence[GenerationDelta]], sampling: SamplingParams, version: int
) -> TensorDict:
    """The contract's columns, with weight_versions, and the oldest of these as weight_version.

    Args:
        prompts: of read_prompts, one for each answer.
        answers: by row, all of a request's deltas in order.
        version: of the weights when the requests began.
    """
    out = answer(
        prompts,
        [[token for delta in row for token in delta.token_ids] for row in answers],
        [[value for delta in row for value in delta.log_probs] for row in answers],
        [str(row[-1].finish_reason) for row in answers],
        sampling=sampling,
        weight_version=version,
    )
    by_row = [spans(row) for row in answers]
    oldest = [
        min((each for each, _ in row), default=deltas[-1].weight_version)
        for row, deltas in zip(by_row, answers, strict=True)
    ]
    out.set("weight_version", torch.tensor(oldest, dtype=torch.int64, device=prompts["prompt_ids"].device))
    return out.set("weight_versions", object_column(by_row))


def spans(deltas: Sequence[GenerationDelta]) -> list[tuple[int, int]]:
    """(version, number of tokens) of a row, in order."""
    pairs: list[tuple[int, int]] = []
    for delta in deltas:
        if not delta.token_ids:
            continue
        if pairs and pairs[-1][0] == delta.weight_version:
            pairs[-1] = delta.weight_version, pairs[-1][1] + len(delta.token_ids)
        else:
            pairs.append((delta.weight_version, len(delta.token_ids)))
    return pairs


def by_version(starts: Sequence[tuple[str, int]], first: int, end: int) -> list[tuple[int, int, int]]:
    """Cut tokens [first, end) of a row where weight versions begin: (version, start, stop), none of them empty.

    Args:
        starts: (version, the token it begins at), in order.
    """
    bounds = [*(start for _, start in starts), end]
    ranges = [
        (int(version), max(start, first), min(stop, end))
        for (version, _), (start, stop) in zip(starts, pairwise(bounds), strict=True)
    ]
    return [span for span in ranges if span[1] < span[2]]
