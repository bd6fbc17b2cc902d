"""What rows come back: greedy decoding, padding, stops, order, refusals of prompts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDict

from core.batch import metadata, objects
from core.errors import ManymeshError, Refused
from core.protocols import LogProbKind, Rollout, SamplingParams, WeightSpec
from manymesh_vllm.config import VllmRolloutConfig
from manymesh_vllm.rollout import VllmRollout
from sdk.testing import characters

MakePrompts = Callable[..., TensorDict]
Responses = Callable[[TensorDict], list[list[int]]]
Checkpoints = Callable[..., str]
Ready = Callable[..., VllmRollout]

RAGGED = ([1, 5, 6, 9, 30], [7], [40, 41, 42])
EOS = 2


def greedy(max_new_tokens: int = 8, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens, **options)


def test_it_is_a_rollout_of_the_contract(rollout: VllmRollout) -> None:
    assert isinstance(rollout, Rollout)
    assert rollout.weight_version == 0


def test_greedy_rows_are_those_of_transformers_each_alone(
    rollout: VllmRollout, reference: Any, prompts: MakePrompts, responses: Responses
) -> None:
    out = rollout.generate(prompts(*RAGGED), greedy(12))
    for row, response in zip(RAGGED, responses(out), strict=True):
        want = reference.generate(
            torch.tensor([row]), do_sample=False, max_new_tokens=12, repetition_penalty=1.0, top_k=None
        )
        assert response == want[0, len(row) :].tolist()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_prompts_give_what_jagged_ones_give(
    rollout: VllmRollout, prompts: MakePrompts, responses: Responses, side: str
) -> None:
    width = max(map(len, RAGGED))
    ids, mask = torch.full((3, width), 63), torch.zeros(3, width, dtype=torch.bool)
    for i, row in enumerate(RAGGED):
        at = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[i, at], mask[i, at] = torch.tensor(row), True
    padded = TensorDict({"prompt_ids": ids, "attention_mask": mask}, batch_size=[3])
    sampling = SamplingParams(num_samples=2, max_new_tokens=6, seed=3)
    assert responses(rollout.generate(padded, sampling)) == responses(rollout.generate(prompts(*RAGGED), sampling))


def test_rows_are_prompt_major_and_token_columns_are_aligned(rollout: VllmRollout, prompts: MakePrompts) -> None:
    out = rollout.generate(
        prompts(*RAGGED, prompt_id=[70, 50, 60]), SamplingParams(num_samples=3, max_new_tokens=4, seed=0)
    )
    assert out.batch_size == (9,)
    assert out["prompt_id"].tolist() == [70] * 3 + [50] * 3 + [60] * 3
    assert out["weight_version"].tolist() == [0] * 9
    assert out["row_weight"].tolist() == [1.0] * 9
    assert out["rollout_log_probs"].dtype == torch.float32
    for i, (ids, mask, log_probs) in enumerate(
        zip(*(out[n].unbind() for n in ("input_ids", "response_mask", "rollout_log_probs")), strict=True)
    ):
        prompt = RAGGED[i // 3]
        assert ids[: len(prompt)].tolist() == prompt
        assert mask.tolist() == [False] * len(prompt) + [True] * (len(ids) - len(prompt))
        assert bool((log_probs[: len(prompt)] == 0).all())
        assert bool((log_probs[len(prompt) :] < 0).all())
    # Arithmetic between token columns works only where they share their offsets.
    assert (out["rollout_log_probs"] * out["response_mask"]).is_nested


def test_metadata_say_temperature_and_kind_of_log_probs(rollout: VllmRollout, prompts: MakePrompts) -> None:
    out = rollout.generate(prompts([5]), SamplingParams(temperature=0.7, max_new_tokens=1, log_probs=LogProbKind.RAW))
    assert metadata(out, "temperature") == 0.7
    assert metadata(out, "log_prob_kind") == "raw"
    assert metadata(rollout.generate(prompts([5]), greedy(1)), "temperature") == 1.0


def test_filler_prompts_give_filler_rows(rollout: VllmRollout, prompts: MakePrompts) -> None:
    batch = prompts([5], [6]).set("row_weight", torch.tensor([1.0, 0.0]))
    out = rollout.generate(batch, SamplingParams(num_samples=2, max_new_tokens=1))
    assert out["row_weight"].tolist() == [1, 1, 0, 0]


def test_no_prompts_give_an_empty_batch_with_all_columns(rollout: VllmRollout, prompts: MakePrompts) -> None:
    empty = TensorDict({"prompt_ids": torch.zeros(0, 4, dtype=torch.int64)}, batch_size=[0])
    out = rollout.generate(empty, SamplingParams(max_new_tokens=1))
    full = rollout.generate(prompts([5]), SamplingParams(max_new_tokens=1))
    assert out.batch_size == (0,)
    assert set(out.keys()) == set(full.keys())


def test_the_eos_ends_a_row_and_belongs_to_the_response(
    rollout: VllmRollout, prompts: MakePrompts, responses: Responses
) -> None:
    out = rollout.generate(prompts([5, 6]), SamplingParams(num_samples=128, max_new_tokens=24, seed=0))
    reasons = objects(out.get("finish_reason"))
    assert {"stop", "length"} == set(reasons)
    for response, reason in zip(responses(out), reasons, strict=True):
        assert EOS not in response[:-1]
        assert (response[-1] == EOS) == (reason == "stop")
        assert len(response) == 24 or reason == "stop"


def test_ignore_eos_samples_the_same_and_goes_on(
    rollout: VllmRollout, prompts: MakePrompts, responses: Responses
) -> None:
    sampling = SamplingParams(num_samples=64, max_new_tokens=24, seed=0)
    stopped = rollout.generate(prompts([5, 6]), sampling)
    out = rollout.generate(prompts([5, 6]), attrs.evolve(sampling, ignore_eos=True))
    assert objects(out.get("finish_reason")) == ["length"] * 64
    pairs = list(zip(responses(out), responses(stopped), strict=True))
    assert any(EOS in response for response, _ in pairs)
    assert all(len(long) == 24 and long[: len(short)] == short for long, short in pairs)


def test_a_stop_token_ends_a_row(rollout: VllmRollout, prompts: MakePrompts, responses: Responses) -> None:
    [free] = responses(rollout.generate(prompts([5, 6]), greedy()))
    stop = free[3]
    out = rollout.generate(prompts([5, 6]), greedy(stop_token_ids=(stop,), ignore_eos=True))
    assert responses(out) == [free[: free.index(stop) + 1]]
    assert objects(out.get("finish_reason")) == ["stop"]


def test_min_new_tokens_holds_every_stop_back(rollout: VllmRollout, prompts: MakePrompts, responses: Responses) -> None:
    batch = prompts([5, 6])
    [free] = responses(rollout.generate(batch, greedy()))
    out = rollout.generate(batch, greedy(stop_token_ids=(free[0],), min_new_tokens=3))
    [response] = responses(out)
    assert not {free[0], EOS} & set(response[:3])
    assert len(response) > 3


def test_each_row_ends_at_its_first_stop_token_or_whole_stop_string(
    rollout: VllmRollout, prompts: MakePrompts, responses: Responses
) -> None:
    sampling = SamplingParams(num_samples=32, max_new_tokens=12, seed=1, ignore_eos=True)
    free = responses(rollout.generate(prompts([5, 6]), sampling))
    a, b, c = [row for row in free if min(row) > 2][:3]  # special tokens have names of several characters
    token, stops = c[2], (characters(a[4:6]), characters(b[2:5]))
    out = rollout.generate(
        prompts([5, 6]), attrs.evolve(sampling, stop=stops, stop_token_ids=(token,), max_new_tokens=10)
    )
    for whole, cut, reason in zip(free, responses(out), objects(out.get("finish_reason")), strict=True):
        text = characters(whole)
        ends = [text.find(stop) + len(stop) for stop in (*stops, characters([token])) if stop in text]
        end = min([*ends, 11])
        assert cut == whole[: min(end, 10)]
        assert reason == ("stop" if end <= 10 else "length")
    assert set(objects(out.get("finish_reason"))) == {"stop", "length"}


def test_a_prompts_last_characters_are_no_part_of_a_stop_string(
    rollout: VllmRollout, prompts: MakePrompts, responses: Responses
) -> None:
    [free] = responses(rollout.generate(prompts([5, 6]), greedy()))
    across = characters([6, free[0]])
    out = rollout.generate(prompts([5, 6]), greedy(stop=(across,)))
    assert across not in characters(free)
    assert responses(out) == [free]


def test_prompts_are_refused_with_the_row_and_the_lengths(rollout: VllmRollout, prompts: MakePrompts) -> None:
    with pytest.raises(Refused, match=r"prompt 1 leaves no room[\s\S]*250 tokens and max_new_tokens 7"):
        rollout.generate(prompts([5], [6] * 250), greedy(7))
    rollout.generate(prompts([6] * 255), greedy(1))
    with pytest.raises(Refused, match=r"prompt 1 has a token[\s\S]*5\.\.64"):
        rollout.generate(prompts([5], [6, 64]), greedy())
    with pytest.raises(Refused, match="no prompts"):
        rollout.generate(TensorDict({"input_ids": torch.ones(1, 2)}, batch_size=[1]), greedy())
    masked = TensorDict(
        {"prompt_ids": torch.ones(2, 2, dtype=torch.int64), "attention_mask": torch.tensor([[1, 1], [0, 0]])},
        batch_size=[2],
    )
    with pytest.raises(Refused, match=r"empty[\s\S]*rows \[1\]"):
        rollout.generate(masked, greedy())


def test_stops_that_the_model_cannot_give_are_refused(
    rollout: VllmRollout, prompts: MakePrompts, checkpoints: Checkpoints, ready: Ready
) -> None:
    with pytest.raises(Refused, match="not in the vocabulary"):
        rollout.generate(prompts([5]), greedy(stop_token_ids=(64,)))
    with pytest.raises(Refused, match="empty"):
        rollout.generate(prompts([5]), greedy(stop=("",)))
    without = ready(checkpoints(seed=1))
    with pytest.raises(Refused, match="need a tokenizer"):
        without.generate(prompts([5]), greedy(stop=("a",)))


def test_logits_that_are_not_finite_are_an_error(ready: Ready, checkpoints: Checkpoints, prompts: MakePrompts) -> None:
    directory = checkpoints(seed=1)
    rollout = ready(directory)
    weights = dict(load_file(f"{directory}/model.safetensors"))
    weights["model.norm.weight"] = torch.full((64,), torch.nan)
    rollout.begin_weight_update([WeightSpec(name, tuple(t.shape), "float32") for name, t in weights.items()], 1)
    rollout.load_bucket(list(weights.items()))
    rollout.finish_weight_update()
    with pytest.raises(ManymeshError, match=r"not finite[\s\S]*version 1"):
        rollout.generate(prompts([5]), SamplingParams(max_new_tokens=2))


def test_directories_that_hold_no_model_for_it_are_refused(
    tmp_path: Path, ready: Ready, checkpoints: Checkpoints, model_dir: str
) -> None:
    with pytest.raises(Refused, match="no model directory"):
        ready(str(tmp_path / "nowhere"))
    with pytest.raises(Refused, match=r"head size[\s\S]*have: 16[\s\S]*32, 64"):
        ready(checkpoints(head_dim=16))
    with pytest.raises(Refused, match=r"cannot run[\s\S]*quantization"):
        ready(model_dir, vllm={"quantization": "no_such_form"})
    copy = shutil.copytree(model_dir, tmp_path / "copy")
    weights = load_file(copy / "model.safetensors")
    weights.pop("lm_head.weight")
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(Refused, match=r"lacks 1 of[\s\S]*lm_head\.weight"):
        ready(str(copy))


def test_a_device_that_this_build_is_not_for_is_refused(model_dir: str) -> None:
    with pytest.raises(Refused, match="CUDA"):
        VllmRollout(VllmRolloutConfig(model_dir), device="cuda")


def test_an_engine_that_needs_other_groups_is_refused_while_one_lives(
    rollout: VllmRollout, ready: Ready, checkpoints: Checkpoints
) -> None:
    with pytest.raises(Refused, match=r"share its groups[\s\S]*want: \(1, True\)"):
        ready(checkpoints("qwen3_moe"))
