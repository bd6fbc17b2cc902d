"""The contract's sampling parameters in SGLang's words, and SGLang's answers in the contract's, without SGLang."""

from __future__ import annotations

from typing import Any

import pytest

from core.errors import ManymeshError, Refused
from core.rollout import GenerationDelta, LogProbKind, SamplingParams
from manymesh_sglang.sampling import Answer, check, check_probe, request


def test_a_request_says_all_of_the_contracts_parameters_and_no_more() -> None:
    sampling = SamplingParams(
        max_new_tokens=9,
        min_new_tokens=2,
        temperature=0.7,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.2,
        stop=("x",),
        ignore_eos=True,
        log_probs=LogProbKind.RAW,
    )
    assert request(sampling, [2, 5], 7) == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "max_new_tokens": 9,
        "min_new_tokens": 2,
        "stop_token_ids": [2, 5],
        "stop": ["x"],
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "sampling_seed": 7,
        "custom_params": {"manymesh_log_probs": "raw"},
    }


def test_unseeded_requests_draw_from_fresh_entropy() -> None:
    seeds = {request(SamplingParams(), [], None)["sampling_seed"] for _ in range(4)}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**61 for seed in seeds)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repetition_penalty": 2.5}, "penalty"),
        ({"stop": tuple(map(str, range(33)))}, "stop strings"),
        ({"temperature": 1e-7}, "so low a temperature"),
    ],
)
def test_what_sglang_does_not_take_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        check(SamplingParams(**options))


def said(
    ids: list[int], num_tokens: int, reason: dict[str, Any] | None = None, version: str = "3", **more: Any
) -> dict[str, Any]:
    values = [[-token / 10, token, None] for token in ids]
    meta = {"finish_reason": reason, "completion_tokens": num_tokens, "output_token_logprobs": values}
    return {"output_ids": ids, "meta_info": meta | {"weight_version": version} | more}


def test_a_streams_answers_become_deltas_cut_where_versions_begin() -> None:
    answer = Answer("a", certain=False)
    assert answer.read(said([5, 6], 2)) == [GenerationDelta("a", (5, 6), (-0.5, -0.6), 3)]
    spans = [{"version": "3", "start": 0, "end": 3}, {"version": "4", "start": 3, "end": 4}]
    last = answer.read(said([7, 8], 4, {"type": "stop", "matched": 8}, "4", weight_versions=spans))
    assert last == [GenerationDelta("a", (7,), (-0.7,), 3), GenerationDelta("a", (8,), (-0.8,), 4, "stop")]


def test_an_abort_that_says_the_last_token_again_adds_none() -> None:
    answer = Answer("a", certain=False)
    answer.read(said([5, 6], 2))
    assert answer.read(said([6], 2, {"type": "abort", "message": "..."})) == [GenerationDelta("a", (), (), 3, "abort")]


def test_certain_tokens_have_log_probability_zero_and_a_server_of_itself_has_version_zero() -> None:
    [delta] = Answer("a", certain=True).read(said([5], 1, {"type": "length", "length": 1}, "default"))
    assert delta == GenerationDelta("a", (5,), (0.0,), 0, "length")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (said([5], 1, {"type": "abort", "status_code": 500, "message": "out of memory"}), "out of memory"),
        (said([5], 2), "lacks tokens"),
        (said([5], 1, output_token_logprobs=[[None, 5, None]]), "not finite"),
        (said([5], 1, output_token_logprobs=[[float("nan"), 5, None]]), "not finite"),
    ],
)
def test_answers_that_cannot_be_are_errors_that_name_the_request(answer: dict[str, Any], message: str) -> None:
    with pytest.raises(ManymeshError, match=rf"{message}[\s\S]*'a'|'a'[\s\S]*{message}|{message}"):
        Answer("a", certain=False).read(answer)


def test_a_server_that_samples_its_own_way_is_known_by_its_answer() -> None:
    check_probe(said([], 0, output_token_logprobs=[[0.0, 5, None]]), "here")
    with pytest.raises(Refused, match=r"here[\s\S]*MANYMESH_SGLANG_SAMPLER=1"):
        check_probe(said([5], 1), "here")
