"""The contract's sampling parameters in SGLang's words, and its answers in the contract's. Imports no SGLang.

Requests are marked as ours by `custom_params`: the sampler of manymesh_sglang.sampler, which the engines run with,
gives them streams and log-probabilities of the contract, and ends them at their stop tokens alone.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import attrs

from core.errors import ManymeshError, Refused
from core.rollout import GenerationDelta, LogProbKind, SamplingParams
from manymesh.parts.rollout_checks import not_finite
from manymesh.parts.scoring import RowScore
from manymesh.parts.server_rows import by_version
from manymesh_sglang.sampler_protocol import KIND, SCORE, SEED_BITS, SWITCH

FINISHED = ("stop", "length", "abort")
MAX_PENALTY = 2.0
MAX_STOPS = 32


def check(sampling: SamplingParams) -> None:
    """Raises Refused for what SGLang doesn't take."""
    if sampling.repetition_penalty > MAX_PENALTY:
        raise Refused(
            "SGLang takes no such repetition penalty", have=sampling.repetition_penalty, want=f"at most {MAX_PENALTY:g}"
        )
    if len(sampling.stop) > MAX_STOPS:
        raise Refused("SGLang takes no more stop strings", have=len(sampling.stop), want=f"at most {MAX_STOPS}")
    if 0 < sampling.temperature < 1e-6:
        raise Refused("SGLang takes so low a temperature for 0", have=sampling.temperature, want="0, or at least 1e-6")


def request(sampling: SamplingParams, stop_ids: Sequence[int], seed: int | None) -> dict[str, Any]:
    """SGLang's parameters of one row, plain data.

    Args:
        stop_ids: all tokens that end a response; SGLang is told of no EOS beside them.
        seed: of the row's stream, SEED_BITS wide; None for fresh entropy.
    """
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "max_new_tokens": sampling.max_new_tokens,
        "min_new_tokens": sampling.min_new_tokens,
        "stop_token_ids": list(stop_ids),
        "stop": list(sampling.stop) or None,
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "sampling_seed": secrets.randbits(SEED_BITS) if seed is None else seed,
        "custom_params": {KIND: LogProbKind(sampling.log_probs).value},
    }


def score_request(temperature: float) -> dict[str, Any]:
    """SGLang's parameters of a text to score. It samples a token too, which nobody reads.

    Raises:
        Refused: SGLang takes so low a temperature for 0.
    """
    sampling = SamplingParams(temperature=temperature, max_new_tokens=1)
    check(sampling)
    return request(sampling, (), 0) | {"custom_params": {KIND: SCORE}}


def row_score(reply: Mapping[str, Any], num_tokens: int, top_k: int) -> RowScore:
    """What SGLang says of a text's tokens behind its first, and of the most likely ones.

    Raises:
        ManymeshError: SGLang gave up on the request, or lacks tokens.
    """
    meta = reply["meta_info"]
    if finish_reason(meta.get("finish_reason"), "score") == "abort":
        raise ManymeshError("SGLang gave up on a score", have="abort", mend="score again")
    values = [each[0] for each in meta["input_token_logprobs"][1:]]
    best = [[(each[1], each[0]) for each in row] for row in (meta.get("input_top_logprobs") or ())[1:]]
    if len(values) != num_tokens - 1 or (top_k and [len(row) for row in best] != [top_k] * len(values)):
        raise ManymeshError(
            "SGLang's scores lack tokens",
            have=f"{len(values)} log-probabilities, {len(best)} positions with the most likely",
            want=num_tokens - 1,
        )
    return values, best if top_k else [[]] * len(values)


PROBE = request(SamplingParams(temperature=0.0, max_new_tokens=1, log_probs=LogProbKind.PROCESSED), (), 0)


def check_probe(reply: Mapping[str, Any], where: str) -> None:
    """Raises Refused where the answer to PROBE shows that SGLang samples its own way: it knows no such kind."""
    [value] = [each[0] for each in reply["meta_info"]["output_token_logprobs"]]
    if value != 0:
        raise Refused(
            "the server has no streams and log-probabilities by row",
            have=f"log-probability {value} of a certain token",
            want=0,
            where=where,
            mend=f"start it where manymesh-sglang is installed, with {SWITCH}=1 in its environment",
        )


@attrs.define
class Answer:
    """One request's deltas, read off SGLang's answers, each of which may be the next of a stream.

    Attributes:
        request_id: the contract's, not SGLang's.
        certain: its tokens' log-probabilities are 0.
        num_tokens: that have come.
    """

    request_id: str
    certain: bool
    num_tokens: int = 0
    finish_reason: str | None = None

    def read(self, reply: Mapping[str, Any]) -> list[GenerationDelta]:
        """What is new in it, cut where weight versions begin.

        Raises:
            ManymeshError: SGLang gave up on the request, or the model has logits that are not finite.
        """
        meta = reply["meta_info"]
        reason = finish_reason(meta.get("finish_reason"), self.request_id)
        end = int(meta["completion_tokens"])
        # An aborted stream may say its last token again, so that what is new is counted, not believed.
        num_new = end - self.num_tokens
        tokens = tuple(reply["output_ids"][-num_new:]) if num_new else ()
        values = tuple(each[0] for each in meta.get("output_token_logprobs", ())[-num_new:]) if num_new else ()
        if len(tokens) < num_new or len(values) < num_new:
            raise ManymeshError(
                "SGLang's answer lacks tokens",
                have=f"{len(tokens)} tokens, {len(values)} log-probabilities",
                want=num_new,
                where=f"request {self.request_id!r}",
            )
        if not all(value is not None and isfinite(value) for value in values):
            raise not_finite(f"request {self.request_id!r}, weight version {meta['weight_version']}")
        if self.certain:
            values = (0.0,) * num_new
        spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0}]
        starts = [(number(each["version"]), each["start"]) for each in spans]
        pieces = by_version(starts, self.num_tokens, end)
        first, self.num_tokens, self.finish_reason = self.num_tokens, end, reason
        deltas = [
            GenerationDelta(self.request_id, tokens[a - first : b - first], values[a - first : b - first], version)
            for version, a, b in pieces
        ]
        if reason is not None and not deltas:
            return [GenerationDelta(self.request_id, (), (), int(starts[-1][0]), reason)]
        if reason is not None:
            deltas[-1] = attrs.evolve(deltas[-1], finish_reason=reason)
        return deltas


def number(version: str) -> str:
    """A server that was started by itself calls its first weights "default": version 0."""
    return version if version.isdecimal() else "0"


def finish_reason(info: Mapping[str, Any] | None, request_id: str) -> str | None:
    """ "stop", "length" or "abort"; None while it runs. Raises ManymeshError where SGLang gave up."""
    if info is None:
        return None
    reason = info["type"]
    status = info.get("status_code")
    if reason not in FINISHED or (reason == "abort" and status is not None and int(status) >= 400):
        raise ManymeshError(
            "SGLang gave up on a request", have=f"{reason}: {info.get('message', '')}", where=f"request {request_id!r}"
        )
    return str(reason)
