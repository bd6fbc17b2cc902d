"""Weight updates of a live engine, by what it then samples; and memory that this platform cannot give back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict
from transformers import AutoModelForCausalLM
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from core.errors import ManymeshError, Refused
from core.protocols import LogProbKind, SamplingParams, WeightSpec
from manymesh_vllm.config import VllmRolloutConfig
from manymesh_vllm.rollout import VllmRollout

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
LONG = [3 + i * 7 % 61 for i in range(200)]  # fills whole blocks of the KV cache, which are kept

MakePrompts = Callable[..., TensorDict]
Checkpoints = Callable[..., str]
Ready = Callable[..., VllmRollout]
Weights = dict[str, torch.Tensor]


def saved(directory: str) -> Weights:
    return dict(load_file(f"{directory}/model.safetensors"))


def specs(weights: Weights) -> list[WeightSpec]:
    return [WeightSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in weights.items()]


def buckets(weights: Weights, size: int = 3) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Last names first: the order is the sender's business. q, k and v are torn apart."""
    items = list(weights.items())[::-1]
    return (items[i : i + size] for i in range(0, len(items), size))


def update(rollout: VllmRollout, weights: Weights, version: int, size: int = 3) -> None:
    rollout.begin_weight_update(specs(weights), version)
    for bucket in buckets(weights, size):
        rollout.load_bucket(bucket)
    rollout.finish_weight_update()


@torch.no_grad()
def distance(rollout: VllmRollout, directory: str, prompts: MakePrompts) -> float:
    """Of the rollout's greedy log-probs from transformers', the largest; infinite where a token differs."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    out = rollout.generate(prompts([5, 6, 7], [9], LONG), GREEDY)
    worst = 0.0
    for ids, mask, log_probs in zip(
        *(out[n].unbind() for n in ("input_ids", "response_mask", "rollout_log_probs")), strict=True
    ):
        want = model(ids[None]).logits[0, :-1].log_softmax(-1)
        if want.argmax(-1)[mask[1:]].tolist() != ids[mask].tolist():
            return float("inf")
        worst = max(worst, float((want.gather(1, ids[1:, None])[:, 0] - log_probs[1:])[mask[1:]].abs().max()))
    return worst


@pytest.fixture(scope="module")
def live(make_ready: Ready, checkpoints: Checkpoints) -> Iterator[VllmRollout]:
    """One engine that the tests below update again and again."""
    rollout = make_ready(checkpoints(seed=1))
    yield rollout
    rollout.shutdown()


@pytest.fixture
def first(live: VllmRollout, checkpoints: Checkpoints) -> Weights:
    """Weights of another model; the engine has those of seed 1 as version 0, whatever a test did before."""
    update(live, saved(checkpoints(seed=1)), 0)
    return saved(checkpoints(seed=2))


def version(rollout: VllmRollout) -> int | None:
    return rollout.weight_version


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3", {"vocab_size": 70}),  # vLLM pads it
        ("qwen2", {}),  # biases beside the fused weights
        ("llama", {}),
        ("qwen3_moe", {}),
    ],
    ids=["untied", "tied", "padded vocabulary", "biases", "llama", "experts"],
)
def test_it_is_exactly_transformers_before_and_after_each_of_three_updates(
    ready: Ready, checkpoints: Checkpoints, prompts: MakePrompts, family: str, options: dict[str, Any]
) -> None:
    rollout = ready(checkpoints(family, 1, **options))
    assert distance(rollout, checkpoints(family, 1, **options), prompts) < 1e-4
    for number, (seed, size) in enumerate([(2, 3), (3, 1), (1, 100)], start=1):
        directory = checkpoints(family, seed, **options)
        assert distance(rollout, directory, prompts) > 1e-1
        update(rollout, saved(directory), number, size)
        assert version(rollout) == number
        assert distance(rollout, directory, prompts) < 1e-4


def test_what_the_old_weights_left_in_the_kv_cache_is_not_used_after_an_update(
    live: VllmRollout, first: Weights, checkpoints: Checkpoints, prompts: MakePrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    live.generate(prompts(LONG), GREEDY)
    [again] = live._engine.llm.generate([{"prompt_token_ids": LONG}], use_tqdm=False)
    assert again.num_cached_tokens > 100  # so that there is something that could be used
    update(live, first, 1)
    assert distance(live, checkpoints(seed=2), prompts) < 1e-4
    with monkeypatch.context() as patched:  # and this test would see it
        patched.setattr(live._engine, "drop_caches", lambda: True)
        update(live, saved(checkpoints(seed=1)), 2)
    assert distance(live, checkpoints(seed=1), prompts) > 1e-1


def test_a_kv_cache_that_cannot_be_dropped_is_an_error(
    live: VllmRollout, first: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live._engine, "drop_caches", lambda: False)
    with pytest.raises(ManymeshError, match="KV cache of the old weights"):
        update(live, first, 1)
    assert version(live) is None


def test_rows_say_which_weights_sampled_them_and_older_ones_may_be_refused(
    live: VllmRollout, first: Weights, prompts: MakePrompts
) -> None:
    update(live, first, 4)
    assert live.generate(prompts([5], [6]), GREEDY, min_version=4)["weight_version"].tolist() == [4, 4]
    with pytest.raises(Refused, match=r"too old[\s\S]*version 4[\s\S]*version 5"):
        live.generate(prompts([5]), GREEDY, min_version=5)


def test_tied_weights_come_once(ready: Ready, checkpoints: Checkpoints) -> None:
    directory = checkpoints("qwen3", 2, tie_word_embeddings=True)
    rollout, weights = ready(directory), saved(directory)
    assert "lm_head.weight" not in weights
    with pytest.raises(Refused, match=r"1 unexpected[\s\S]*lm_head\.weight"):
        rollout.begin_weight_update([*specs(weights), WeightSpec("lm_head.weight", (64, 64), "float32")], 2)
    assert version(rollout) == 0


def test_weights_of_another_precision_are_cast(ready: Ready, checkpoints: Checkpoints, prompts: MakePrompts) -> None:
    halves, whole = ready(checkpoints(seed=1), dtype="bfloat16"), ready(checkpoints(seed=2), dtype="bfloat16")
    update(halves, saved(checkpoints(seed=2)), 1)
    a, b = (each.generate(prompts([5, 6, 7]), GREEDY)["input_ids"].values() for each in (halves, whole))
    assert torch.equal(a, b)


@pytest.mark.parametrize("options", [{}, {"vocab_size": 70}], ids=["whole", "padded vocabulary"])
def test_tensors_may_be_reused_after_load_bucket(
    ready: Ready, checkpoints: Checkpoints, prompts: MakePrompts, options: dict[str, Any]
) -> None:
    rollout, weights = ready(checkpoints(seed=1, **options)), saved(checkpoints(seed=2, **options))
    rollout.begin_weight_update(specs(weights), 1)
    for bucket in buckets(weights, 2):
        rollout.load_bucket(bucket)
        for _, tensor in bucket:
            tensor.fill_(torch.nan)
    rollout.finish_weight_update()
    assert distance(rollout, checkpoints(seed=2, **options), prompts) < 1e-4


def renamed(weights: Weights) -> Weights:
    return {("model.strange" if name == "model.norm.weight" else name): t for name, t in weights.items()}


def reshaped(weights: Weights) -> Weights:
    return weights | {"model.norm.weight": torch.ones(65)}


def integers(weights: Weights) -> Weights:
    return weights | {"model.norm.weight": torch.ones(64, dtype=torch.int64)}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (renamed, r"24 matched, 1 missing, 1 unexpected[\s\S]*model\.norm\.weight[\s\S]*model\.strange"),
        (reshaped, r"1 of 25[\s\S]*model\.norm\.weight is \(65,\), not \(64,\)"),
        (integers, r"1 of 25[\s\S]*model\.norm\.weight is int64, not float32"),
    ],
)
def test_weights_of_another_model_are_refused_and_the_old_ones_stay(
    live: VllmRollout,
    first: Weights,
    checkpoints: Checkpoints,
    prompts: MakePrompts,
    spoil: Callable[[Weights], Weights],
    message: str,
) -> None:
    with pytest.raises(Refused, match=message):
        live.begin_weight_update(specs(spoil(first)), 1)
    assert version(live) == 0
    assert distance(live, checkpoints(seed=1), prompts) < 1e-4


def test_an_update_that_stays_incomplete_leaves_no_version(
    live: VllmRollout, first: Weights, checkpoints: Checkpoints, prompts: MakePrompts
) -> None:
    live.begin_weight_update(specs(first), 1)
    assert version(live) is None
    last, *rest = buckets(first)
    for bucket in rest:
        live.load_bucket(bucket)
    with pytest.raises(Refused, match=rf"3 of the weights[\s\S]*{last[0][0]}"):
        live.finish_weight_update()
    with pytest.raises(Refused, match=r"no valid weights[\s\S]*a weight update under way"):
        live.generate(prompts([5]), GREEDY)
    live.load_bucket(last)
    live.finish_weight_update()
    assert distance(live, checkpoints(seed=2), prompts) < 1e-4


@pytest.mark.parametrize("num_buckets", [0, 1, 12, 25])
def test_an_aborted_update_leaves_no_version_and_the_next_one_is_whole(
    live: VllmRollout, first: Weights, checkpoints: Checkpoints, prompts: MakePrompts, num_buckets: int
) -> None:
    live.begin_weight_update(specs(first), 1)
    for _, bucket in zip(range(num_buckets), buckets(first, 1), strict=False):
        live.load_bucket(bucket)
    live.abort_weight_update()
    assert version(live) is None
    with pytest.raises(Refused, match="no valid weights"):
        live.generate(prompts([5]), GREEDY)
    for call in (lambda: live.load_bucket(next(buckets(first))), live.finish_weight_update):
        with pytest.raises(Refused, match="no weight update is under way"):
            call()
    live.begin_weight_update(specs(first), 2)  # an update that nobody finished is forgotten by the next
    live.load_bucket(next(buckets(first, 5)))
    update(live, first, 3)
    assert version(live) == 3
    assert distance(live, checkpoints(seed=2), prompts) < 1e-4


def test_a_bad_bucket_is_refused_as_a_whole(
    live: VllmRollout, first: Weights, checkpoints: Checkpoints, prompts: MakePrompts
) -> None:
    live.begin_weight_update(specs(first), 1)
    name, other = "model.norm.weight", "model.embed_tokens.weight"
    for bad in (
        [(other, first[other]), ("model.strange", torch.ones(1))],
        [(other, first[other]), (name, torch.ones(63))],
        [(other, first[other]), (other, first[other])],
    ):
        with pytest.raises(Refused, match="bucket"):
            live.load_bucket(bad)
    for bucket in buckets(first):
        live.load_bucket(bucket)
    live.finish_weight_update()
    assert distance(live, checkpoints(seed=2), prompts) < 1e-4


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
    assert version(live) is None
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


def test_memory_that_this_platform_cannot_free_is_not_released_and_resume_is_a_no_op(
    live: VllmRollout, first: Weights, checkpoints: Checkpoints, prompts: MakePrompts
) -> None:
    for tags in (["weights"], ["kv_cache"], ["weights", "kv_cache"]):
        with pytest.raises(Refused, match="frees nothing on CPU"):
            live.release(tags)
    with pytest.raises(Refused, match="optimizer"):
        live.release(["weights", "optimizer"])  # type: ignore[list-item]
    live.resume(["weights", "kv_cache"])
    assert version(live) == 0
    assert distance(live, checkpoints(seed=1), prompts) < 1e-4


def test_nothing_works_before_initialize_nor_after_shutdown(checkpoints: Checkpoints, prompts: MakePrompts) -> None:
    config = VllmRolloutConfig(checkpoints(seed=1), max_model_len=256, kv_cache_mb=16, max_num_batched_tokens=256)
    rollout = VllmRollout(config, device="cpu")
    sampling = SamplingParams(max_new_tokens=2, log_probs=LogProbKind.RAW)
    for _ in range(2):
        assert version(rollout) is None
        with pytest.raises(Refused, match="not initialized"):
            rollout.generate(prompts([5]), sampling)
        for call in (
            lambda: rollout.begin_weight_update([], 1),
            lambda: rollout.release(["weights"]),
            lambda: rollout.resume(["weights"]),
        ):
            with pytest.raises(Refused, match=r"initialize\(\)"):
                call()
        rollout.initialize()
        rollout.generate(prompts([5]), sampling)
        rollout.shutdown()
