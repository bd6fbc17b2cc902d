"""What is the in-process rollout's own: how vLLM batches, caches and reloads, and what it doesn't take."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import torch
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from core.errors import ManymeshError, Refused
from core.rollout import LogProbKind, SamplingParams
from manymesh_vllm.config import VllmRolloutConfig
from manymesh_vllm.local_rollout import VllmRollout
from sdk.conformance.suites.rollout_base import (
    Models,
    Weights,
    buckets,
    greedy_error,
    prompts,
    responses,
    rows_of,
    specs,
    update,
)
from sdk.conformance.suites.rollout_sampling import log_probs_of

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
LONG = Models.long(200)
PROMPTS = [[1, 5, 6], [7], [40, 41, 42, 43], [9, 9], [1, 5, 6], [12, 13, 14, 15, 16, 17]]

Ready = Callable[..., VllmRollout]


@pytest.fixture
def first(live: VllmRollout, models: Models) -> Weights:
    """Weights of model 2; the engine has those of model 1 as version 0, whatever a test did before."""
    update(live, models.weights(1), 0)
    return models.weights(2)


def error(rollout: VllmRollout, model: object) -> float:
    out = rollout.generate(prompts([5, 6, 7], [9], LONG), GREEDY)
    return max(greedy_error(model, row) for row in rows_of(out))


def test_a_rows_samples_dont_depend_on_how_many_run_at_once_nor_on_what_is_cached(
    live: VllmRollout, first: Weights, ready: Ready, models: Models
) -> None:
    seeded = SamplingParams(num_samples=3, max_new_tokens=10, seed=42)
    few = ready(models.directory(1), max_num_seqs=4, enable_prefix_caching=False)
    have, want = (responses(rollout.generate(prompts(*PROMPTS), seeded)) for rollout in (few, live))
    assert have == want


def test_a_rows_samples_outlive_being_put_off_for_want_of_kv_cache(
    live: VllmRollout, first: Weights, ready: Ready, models: Models
) -> None:
    long = prompts(*([3 + i] * 150 for i in range(8)))
    sampling = SamplingParams(num_samples=4, max_new_tokens=90, seed=1, ignore_eos=True)
    tight = ready(models.directory(1), kv_cache_mb=2, max_model_len=240, enable_prefix_caching=False)
    cache = tight._engine.llm.llm_engine.vllm_config.cache_config
    assert 8 * 240 < cache.num_gpu_blocks * cache.block_size < 32 * 240 / 2
    assert responses(tight.generate(long, sampling)) == responses(live.generate(long, sampling))


def test_a_temperature_that_vllm_would_warm_is_kept_or_refused(
    live: VllmRollout, first: Weights, models: Models
) -> None:
    cold = SamplingParams(temperature=0.004, max_new_tokens=4, seed=0)
    [row] = rows_of(live.generate(prompts([5, 6]), cold))
    want = log_probs_of(models.reference(1), row.prompt, row.tokens, cold)
    assert (row.log_probs - want).abs().max() < 1e-2  # 250 times the error of a logit
    with pytest.raises(Refused, match=r"so low a temperature[\s\S]*0\.004"):
        live.generate(prompts([5, 6]), attrs.evolve(cold, log_probs=LogProbKind.RAW))


def test_what_the_old_weights_left_in_the_kv_cache_would_show(
    live: VllmRollout, first: Weights, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    live.generate(prompts(LONG), GREEDY)
    [again] = live._engine.llm.generate([{"prompt_token_ids": LONG}], use_tqdm=False)
    assert again.num_cached_tokens > 100
    with monkeypatch.context() as patched:
        patched.setattr(live._engine, "drop_caches", lambda: True)
        update(live, first, 1)
    assert error(live, models.reference(2)) > 1e-1
    update(live, first, 2)
    assert error(live, models.reference(2)) < 1e-4


def test_a_kv_cache_that_cannot_be_dropped_is_an_error(
    live: VllmRollout, first: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live._engine, "drop_caches", lambda: False)
    with pytest.raises(ManymeshError, match="KV cache of the old weights"):
        update(live, first, 1)
    assert live.weight_version is None


def test_a_model_in_bfloat16_takes_weights_in_float32(ready: Ready, models: Models) -> None:
    halves, whole = (ready(models.directory(number), dtype="bfloat16") for number in (1, 2))
    update(halves, models.weights(2), 1)
    a, b = (responses(each.generate(prompts([5, 6, 7]), GREEDY)) for each in (halves, whole))
    assert a == b


def test_tensors_of_a_vocabulary_that_vllm_pads_may_be_reused_after_load_bucket(ready: Ready, models: Models) -> None:
    """They are held until the end, the others until their layer is whole."""
    rollout, weights = ready(models.directory(1, vocab_size=70)), models.weights(2, vocab_size=70)
    rollout.begin_weight_update(specs(weights), 1)
    for bucket in buckets(weights, 2):
        rollout.load_bucket(bucket)
        for _, tensor in bucket:
            tensor.fill_(torch.nan)
    rollout.finish_weight_update()
    assert error(rollout, models.reference(2, vocab_size=70)) < 1e-4


def test_parameters_that_vllm_leaves_out_are_an_error(
    live: VllmRollout, first: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = live._engine.worker.model_runner.get_model()
    load = model.load_weights
    monkeypatch.setattr(
        model, "load_weights", lambda items: load(item for item in items if "o_proj" not in item[0]), raising=False
    )
    with pytest.raises(ManymeshError, match=r"left parameters[\s\S]*layers\.0\.self_attn\.o_proj\.weight"):
        update(live, first, 1)
    assert live.weight_version is None
    live.abort_weight_update()


def test_nothing_waits_in_vllm_after_an_update(live: VllmRollout, first: Weights) -> None:
    model = live._engine.worker.model_runner.get_model()

    def waiting() -> int:
        return sum(len(get_layerwise_info(layer).loaded_weights) for layer in model.modules())

    live.begin_weight_update(specs(first), 1)
    live.load_bucket([(name, tensor) for name, tensor in first.items() if "q_proj" in name])
    assert waiting() == 2
    live.abort_weight_update()
    assert waiting() == 0
    update(live, first, 2)
    assert waiting() == 0


def test_models_that_vllm_does_not_take_are_refused(ready: Ready, models: Models) -> None:
    with pytest.raises(Refused, match=r"head size[\s\S]*have: 16[\s\S]*32, 64"):
        ready(models.directory(1, head_dim=16))
    with pytest.raises(Refused, match=r"cannot run[\s\S]*quantization"):
        ready(models.directory(1), vllm={"quantization": "no_such_form"})


def test_a_device_that_this_build_is_not_for_is_refused(models: Models) -> None:
    with pytest.raises(Refused, match="CUDA"):
        VllmRollout(VllmRolloutConfig(models.directory(1)), device="cuda")


def test_engines_of_one_process_share_their_groups_and_one_may_start_again(
    live: VllmRollout, ready: Ready, models: Models, tmp_path: Path
) -> None:
    with pytest.raises(Refused, match=r"share its groups[\s\S]*want: \(1, True\)"):
        ready(models.directory(1, "qwen3_moe"))
    copy = shutil.copytree(models.directory(1), tmp_path / "copy", ignore=shutil.ignore_patterns("tokenizer*"))
    rollout = ready(str(copy), kv_cache_mb=16)
    rollout.shutdown()
    rollout.initialize()
    assert rollout.weight_version == 0
    with pytest.raises(Refused, match="need a tokenizer"):
        rollout.generate(prompts([5]), attrs.evolve(GREEDY, stop=("a",)))
    live.generate(prompts([5]), GREEDY)
