"""The contract's sampling parameters in vLLM's words, and log-probabilities of the kind that was asked for."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import Any

import vllm
from vllm.sampling_params import RequestOutputKind
from vllm.v1.sample.sampler import Sampler

from core.errors import ManymeshError, Refused
from core.rollout import LogProbKind, SamplingParams
from manymesh.parts.requests import is_certain
from manymesh.parts.rollout_checks import not_finite
from manymesh.parts.scoring import RowScore

COLDEST = 0.01  # vLLM warms what is colder, to this
FINISHED = ("stop", "length", "abort")


def is_scaled(sampling: SamplingParams) -> bool:
    """Whether logits are divided by the temperature before vLLM sees them, which then samples at 1.

    Penalties, masks and truncation come out alike. What vLLM calls raw is then the tempered distribution, whatever
    truncation follows, and vLLM's lower bound of temperatures doesn't count.
    """
    return sampling.temperature not in (0, 1) and LogProbKind(sampling.log_probs) is not LogProbKind.RAW


def check(sampling: SamplingParams) -> None:
    """Raises Refused for what vLLM cannot sample as it is said."""
    if 0 < sampling.temperature < COLDEST and not is_scaled(sampling):
        raise Refused(
            "vLLM doesn't sample at so low a temperature with raw log-probabilities",
            have=f"temperature {sampling.temperature}, log_probs 'raw'",
            want=f"0 (greedy), or at least {COLDEST}",
            mend="ask for log_probs 'temperature', where any temperature goes",
        )


def check_untempered(sampling: SamplingParams) -> None:
    """Raises Refused where vLLM itself is to divide by a temperature that it warms."""
    if 0 < sampling.temperature < COLDEST:
        raise Refused(
            "vLLM doesn't sample at so low a temperature when it serves",
            have=f"temperature {sampling.temperature}",
            want=f"0 (greedy), or at least {COLDEST}",
        )


def requests(
    sampling: SamplingParams, stop_ids: Sequence[int], num_rows: int, seeds: Sequence[int] | None
) -> list[vllm.SamplingParams]:
    """vLLM's parameters by row.

    Args:
        stop_ids: all tokens that end a response; vLLM is told of no EOS beside them.
        seeds: by row; None leaves the draws to the process's generator.
    """
    base = vllm.SamplingParams(
        temperature=1.0 if is_scaled(sampling) else sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        max_tokens=sampling.max_new_tokens,
        min_tokens=sampling.min_new_tokens,
        stop_token_ids=list(stop_ids),
        ignore_eos=True,
        stop=list(sampling.stop) or None,
        include_stop_str_in_output=True,
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        logprobs=0,  # of the chosen token alone
        flat_logprobs=True,
    )
    if seeds is None:
        return [base] * num_rows
    rows = [copy.copy(base) for _ in range(num_rows)]
    for row, seed in zip(rows, seeds, strict=True):
        row.seed = seed
    return rows


@contextmanager
def log_probs_of(model_runner: Any, sampling: SamplingParams) -> Iterator[None]:
    """Have vLLM give log-probabilities of the asked kind while the requests of one generate call run.

    No other requests run at that time: the engine is this process's own.
    """
    kind = LogProbKind(sampling.log_probs)
    _use_mode(model_runner, "processed_logprobs" if kind is LogProbKind.PROCESSED else "raw_logprobs")
    with logits_divided(model_runner, sampling.temperature if is_scaled(sampling) else 1.0):
        yield


@contextmanager
def logits_divided(model_runner: Any, temperature: float) -> Iterator[None]:
    """Divide all logits by the temperature before vLLM sees them."""
    if temperature == 1:
        yield
        return
    model = model_runner.get_model()
    compute_logits = model.compute_logits

    def tempered(*args: Any, **kwargs: Any) -> Any:
        # In fp32, as vLLM's sampler divides; the logits are fresh, so that they may be written to.
        return compute_logits(*args, **kwargs).float().div_(temperature)

    model.compute_logits = tempered
    try:
        yield
    finally:
        del model.compute_logits  # the instance's, which hides the class's


def _use_mode(model_runner: Any, mode: str) -> None:
    """vLLM fixes the mode when it builds a sampler. The V1 runner's has no state, so another may take its place."""
    sampler = model_runner.sampler
    if sampler.logprobs_mode == mode:
        return
    if isinstance(sampler, Sampler):
        model_runner.sampler = Sampler(mode, sampler.use_fp64_gumbel)
    else:
        sampler.logprobs_mode = mode  # the V2 runner's reads it at every step


def answers(
    outputs: Sequence[vllm.RequestOutput], sampling: SamplingParams, where: str
) -> tuple[list[Sequence[int]], list[Sequence[float]], list[str]]:
    """Tokens, log-probabilities and finish reasons by row.

    With temperature 0 a sampled token is certain: its log-probability is 0 when PROCESSED.

    Args:
        where: weight version and rank, for the error.

    Raises:
        ManymeshError: vLLM gave up on a request, or the model gave logits that are not finite.
    """
    certain = is_certain(sampling)
    tokens: list[Sequence[int]] = []
    log_probs: list[Sequence[float]] = []
    reasons: list[str] = []
    for request in outputs:
        [row] = request.outputs
        if row.finish_reason not in FINISHED:
            raise gave_up(row.finish_reason, request.request_id)
        tokens.append(row.token_ids)
        log_probs.append([0.0] * len(row.token_ids) if certain else row.logprobs.logprobs[: len(row.token_ids)])
        reasons.append(row.finish_reason)
    if not all(isfinite(value) for row in log_probs for value in row):
        raise not_finite(where)
    return tokens, log_probs, reasons


def score_request(top_k: int) -> vllm.SamplingParams:
    """Log-probabilities of the prompt; vLLM samples a token too, which nobody reads."""
    return vllm.SamplingParams(
        temperature=0.0,
        max_tokens=1,
        detokenize=False,
        prompt_logprobs=top_k,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def row_score(request: vllm.RequestOutput, top_k: int) -> RowScore:
    """What vLLM says of a prompt: at each position the token's own, then the most likely.

    Raises:
        ManymeshError: vLLM gave up on the request, or lacks positions.
    """
    log_probs, num_tokens = request.prompt_logprobs, len(request.prompt_token_ids or ())
    [row] = request.outputs
    if log_probs is None or row.finish_reason not in ("stop", "length"):
        raise gave_up(row.finish_reason, request.request_id)
    width = 1 + top_k
    if len(log_probs.logprobs) != (num_tokens - 1) * width:
        raise ManymeshError(
            "vLLM's scores lack tokens",
            have=f"{len(log_probs.logprobs)} values",
            want=f"{(num_tokens - 1) * width}",
            where=request.request_id,
        )
    values, tokens = log_probs.logprobs, log_probs.token_ids
    best = [
        list(zip(tokens[at + 1 : at + width], values[at + 1 : at + width], strict=True))
        for at in range(0, len(values), width)
    ]
    return values[::width], best


def gave_up(reason: str | None, request_id: str) -> ManymeshError:
    return ManymeshError("vLLM gave up on a request", have=f"finish reason {reason!r}", where=request_id)
