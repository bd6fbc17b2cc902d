"""Which tokens are drawn, with what log-probability, from which stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from core.protocols import LogProbKind, SamplingParams
from manymesh_hf.config import HfRolloutConfig
from manymesh_hf.rollout import HfRollout
from sdk.parts.sampling import draw, row_uniforms

MakePrompts = Callable[..., TensorDict]
Responses = Callable[[TensorDict], list[list[int]]]

RAGGED = ([1, 5, 6, 9, 30], [7], [40, 41, 42])


@torch.no_grad()
def next_logits(reference: Any, ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = reference(torch.tensor([ids])).logits
    return logits[0, -1].float()


def processed(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Written from the definitions, on (..., vocab): log-probabilities after temperature and truncation."""
    logits = logits / temperature
    if top_k:
        logits = logits.where(logits >= logits.topk(top_k).values[..., -1:], -torch.inf)
    if top_p < 1:
        probs, order = logits.softmax(-1).sort(descending=True, dim=-1)
        keep = probs.cumsum(-1) - probs < top_p  # the smallest set that reaches top_p
        logits = logits.where(torch.empty_like(keep).scatter(-1, order, keep), -torch.inf)
    if min_p:
        probs = logits.softmax(-1)
        logits = logits.where(probs >= min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return logits.log_softmax(-1)


OPTIONS = {
    "raw": {"temperature": 0.7, "log_probs": LogProbKind.RAW},
    "temperature": {"temperature": 0.7, "log_probs": LogProbKind.TEMPERATURE},
    "temperature 1": {"log_probs": LogProbKind.TEMPERATURE},
    "raw, truncated": {"temperature": 0.7, "top_k": 9, "log_probs": LogProbKind.RAW},
    "temperature, truncated": {"temperature": 0.7, "top_k": 9, "log_probs": LogProbKind.TEMPERATURE},
    "processed by top-k and top-p": {"temperature": 1.3, "top_k": 20, "top_p": 0.8, "log_probs": LogProbKind.PROCESSED},
    "processed by min-p": {"temperature": 1.3, "min_p": 0.1, "log_probs": LogProbKind.PROCESSED},
    "greedy": {"temperature": 0.0, "log_probs": LogProbKind.TEMPERATURE},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@torch.no_grad()
def test_log_probs_agree_with_a_forward_pass_of_transformers(
    rollout: HfRollout, reference: Any, prompts: MakePrompts, options: dict[str, Any]
) -> None:
    out = rollout.generate(prompts(*RAGGED), SamplingParams(num_samples=8, max_new_tokens=8, seed=5, **options))
    t, kind = options.get("temperature", 1.0) or 1.0, options["log_probs"]
    truncation = [options.get("top_k", 0), options.get("top_p", 1.0), options.get("min_p", 0.0)]
    for ids, mask, log_probs in zip(
        *(out[n].unbind() for n in ("input_ids", "response_mask", "rollout_log_probs")), strict=True
    ):
        logits = reference(ids[None]).logits[0, :-1]
        if kind is LogProbKind.PROCESSED:
            want = processed(logits, t, *truncation)
        else:
            want = (logits / (1.0 if kind is LogProbKind.RAW else t)).log_softmax(-1)
        want = want.gather(1, ids[1:, None])[:, 0]
        assert (log_probs[1:] - want)[mask[1:]].abs().max() < 1e-5


def test_greedy_processed_log_probs_are_zero(rollout: HfRollout, prompts: MakePrompts) -> None:
    sampling = SamplingParams(temperature=0.0, max_new_tokens=4, log_probs=LogProbKind.PROCESSED)
    out = rollout.generate(prompts([5]), sampling)
    assert not out["rollout_log_probs"].values().any()


@pytest.mark.parametrize(
    "truncation",
    [(1.0, 0, 1.0, 0.0), (0.7, 0, 1.0, 0.0), (1.5, 6, 1.0, 0.0), (1.5, 0, 0.6, 0.0), (1.5, 0, 1.0, 0.2)],
    ids=["plain", "temperature", "top-k", "top-p", "min-p"],
)
def test_samples_follow_the_distribution_and_never_leave_its_support(
    rollout: HfRollout,
    reference: Any,
    prompts: MakePrompts,
    responses: Responses,
    truncation: tuple[float, int, float, float],
) -> None:
    prompt, num = [5, 6], 4000
    temperature, top_k, top_p, min_p = truncation
    sampling = SamplingParams(
        num_samples=num, max_new_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=11
    )
    tokens = torch.tensor(responses(rollout.generate(prompts(prompt), sampling)))[:, 0]
    counts = torch.bincount(tokens, minlength=64).double()
    probs = processed(next_logits(reference, prompt), *truncation).exp().double()
    assert not counts[probs == 0].any()
    if top_k:
        assert int((counts > 0).sum()) <= top_k
    # Pearson's chi-square with rare tokens in one bin: mean = degrees of freedom, variance twice that.
    common = probs * num >= 5
    want = torch.cat([probs[common], probs[~common].sum()[None]]) * num
    have = torch.cat([counts[common], counts[~common].sum()[None]])
    want, have = want[want > 0], have[want > 0]
    freedom = len(want) - 1
    assert freedom >= 3
    assert ((have - want) ** 2 / want).sum() < freedom + 4 * (2 * freedom) ** 0.5


def test_repetition_penalty_counts_a_rows_own_tokens_only(
    rollout: HfRollout, reference: Any, prompts: MakePrompts
) -> None:
    penalty, rows = 1.8, ([30, 31, 32, 33, 34, 35], [7, 8])
    out = rollout.generate(
        prompts(*rows),
        SamplingParams(max_new_tokens=8, repetition_penalty=penalty, seed=0, log_probs=LogProbKind.PROCESSED),
    )
    for row, ids, log_probs in zip(rows, out["input_ids"].unbind(), out["rollout_log_probs"].unbind(), strict=True):
        for i in range(len(row), len(ids)):
            logits, seen = next_logits(reference, ids[:i].tolist()), ids[:i].unique()
            logits[seen] = torch.where(logits[seen] < 0, logits[seen] * penalty, logits[seen] / penalty)
            assert abs(float(log_probs[i] - logits.log_softmax(-1)[ids[i]])) < 1e-5


SEEDED = SamplingParams(num_samples=3, max_new_tokens=10, seed=42)
PROMPTS = [[1, 5, 6], [7], [40, 41, 42, 43], [9, 9], [1, 5, 6], [12, 13, 14, 15, 16, 17]]


@pytest.fixture(scope="module")
def whole(rollout: HfRollout, prompts: MakePrompts, responses: Responses) -> list[list[int]]:
    return responses(rollout.generate(prompts(*PROMPTS, prompt_id=range(6)), SEEDED))


def test_a_rows_samples_dont_depend_on_its_batch(
    rollout: HfRollout, prompts: MakePrompts, responses: Responses, whole: list[list[int]]
) -> None:
    parts: list[list[int]] = []
    for start, stop in ((0, 1), (1, 5), (5, 6)):
        batch = prompts(*PROMPTS[start:stop], prompt_id=range(start, stop))
        parts += responses(rollout.generate(batch, SEEDED))
    assert parts == whole


def test_a_rows_samples_dont_depend_on_its_place(
    rollout: HfRollout, prompts: MakePrompts, responses: Responses, whole: list[list[int]]
) -> None:
    order = [3, 0, 5, 2, 4, 1]
    batch = prompts(*(PROMPTS[i] for i in order), prompt_id=order)
    out = responses(rollout.generate(batch, SEEDED))
    assert out == [whole[3 * i + j] for i in order for j in range(3)]


@pytest.mark.parametrize("max_batch_rows", [1, 4, 100])
def test_a_rows_samples_dont_depend_on_how_many_run_at_once(
    model_dir: str, prompts: MakePrompts, responses: Responses, whole: list[list[int]], max_batch_rows: int
) -> None:
    chunked = HfRollout(HfRolloutConfig(model_dir, max_batch_rows=max_batch_rows), device="cpu")
    chunked.initialize()
    assert responses(chunked.generate(prompts(*PROMPTS, prompt_id=range(6)), SEEDED)) == whole


def test_rows_without_prompt_id_count_from_zero(
    rollout: HfRollout, prompts: MakePrompts, responses: Responses, whole: list[list[int]]
) -> None:
    assert responses(rollout.generate(prompts(*PROMPTS), SEEDED)) == whole


def test_samples_differ_by_prompt_id_by_sample_and_by_seed(
    rollout: HfRollout, prompts: MakePrompts, responses: Responses, whole: list[list[int]]
) -> None:
    def sample(seed: int | None) -> list[list[int]]:
        sampling = SamplingParams(num_samples=3, max_new_tokens=10, seed=seed)
        return responses(rollout.generate(prompts(*PROMPTS, prompt_id=range(6)), sampling))

    assert len({tuple(row) for row in whole[:3] + whole[12:15]}) == 6  # rows 0 and 4 have one prompt, two ids
    assert sample(43) != whole
    assert sample(-1) != sample(2**64 - 2)
    assert sample(None) != sample(None)


def test_uniforms_are_uniform_and_independent_of_the_number_of_steps() -> None:
    ids = torch.arange(200).repeat_interleave(5)
    samples = torch.arange(5).repeat(200)
    uniforms = row_uniforms(7, ids, samples, 64)
    assert uniforms.shape == (64, 1000)
    assert 0 <= float(uniforms.min()) < float(uniforms.max()) < 1
    assert torch.equal(uniforms[:10], row_uniforms(7, ids, samples, 10))
    counts = torch.histc(uniforms, bins=50, min=0, max=1)
    assert ((counts - 1280) ** 2 / 1280).sum() < 49 + 4 * 98**0.5
    # Rows and steps are not correlated: the correlation of n independent pairs has deviation 1/sqrt(n).
    centred = uniforms - 0.5
    for a, b in ((centred[:, :-1], centred[:, 1:]), (centred[:-1], centred[1:])):
        assert abs(float((a * b).mean()) * 12) < 4 / a.numel() ** 0.5


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    probs = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]]).repeat(4, 1)
    tokens = draw(probs, torch.tensor([0.0, 0.29, 0.31, 1 - 2.0**-53], dtype=torch.float64))
    assert tokens[:, 0].tolist() == [1, 1, 3, 3]
