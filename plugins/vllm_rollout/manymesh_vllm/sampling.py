"""The contract's sampling parameters in vLLM's words, and log-probabilities of the kind that was asked for."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import vllm
from vllm.v1.sample.sampler import Sampler

from core.errors import ManymeshError, Refused
from core.rollout import LogProbKind, SamplingParams

COLDEST = 0.01  # vLLM warms what is colder, to this
FINISHED = ("stop", "length", "abort")


def is_scaled(sampling: SamplingParams) -> bool:
    """Whether logits are divided by the temperature before vLLM sees them, which then samples at 1.

    Penalties, masks and truncation come out alike. What vLLM calls raw is then the tempered distribution, whatever
    truncation follows, and vLLM's lower bound of temperatures doesn't count.
    """
    return sampling.temperature not in (0, 1) and LogProbKind(sampling.log_probs) is not LogProbKind.RAW


def is_certain(sampling: SamplingParams) -> bool:
    """Whether sampled tokens have log-probability 0: with temperature 0, when PROCESSED."""
    return sampling.temperature == 0 and LogProbKind(sampling.log_probs) is LogProbKind.PROCESSED


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
    if not is_scaled(sampling):
        yield
        return
    model = model_runner.get_model()
    compute_logits = model.compute_logits

    def tempered(*args: Any, **kwargs: Any) -> Any:
        # In fp32, as vLLM's sampler divides; the logits are fresh, so that they may be written to.
        return compute_logits(*args, **kwargs).float().div_(sampling.temperature)

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
    outputs: Sequence[vllm.RequestOutput], sampling: SamplingParams
) -> tuple[list[Sequence[int]], list[Sequence[float]], list[str]]:
    """Tokens, log-probabilities and finish reasons by row.

    With temperature 0 a sampled token is certain: its log-probability is 0 when PROCESSED.

    Raises:
        ManymeshError: vLLM gave up on a request.
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
    return tokens, log_probs, reasons


def gave_up(reason: str | None, request_id: str) -> ManymeshError:
    return ManymeshError("vLLM gave up on a request", have=f"finish reason {reason!r}", where=request_id)


def not_finite(where: str) -> ManymeshError:
    return ManymeshError(
        "the model gave logits that are not finite",
        where=where,
        mend="look at the last weight update: parameters may be NaN or infinite",
    )
