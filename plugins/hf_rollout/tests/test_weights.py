"""Weight updates, and memory that is released and resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict

import sdk.parts.saved_form
from core.errors import Refused
from core.protocols import SamplingParams, WeightSpec
from manymesh_hf.config import HfRolloutConfig
from manymesh_hf.rollout import HfRollout

SAMPLING = SamplingParams(num_samples=2, max_new_tokens=6, seed=9)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "untied": ("qwen3", {}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "fused experts": ("qwen3_moe", {}),
}

MakePrompts = Callable[..., TensorDict]
Checkpoints = Callable[..., str]
Rows = Callable[[HfRollout], tuple[torch.Tensor, torch.Tensor]]
Weights = dict[str, torch.Tensor]


def ready(directory: str, **options: Any) -> HfRollout:
    rollout = HfRollout(HfRolloutConfig(directory, **options), device="cpu")
    rollout.initialize()
    return rollout


def saved(directory: str) -> Weights:
    return dict(load_file(f"{directory}/model.safetensors"))


def specs(weights: Weights) -> list[WeightSpec]:
    return [WeightSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in weights.items()]


def buckets(weights: Weights, size: int = 3) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Last names first: the order is the sender's business."""
    items = list(weights.items())[::-1]
    return (items[i : i + size] for i in range(0, len(items), size))


def update(rollout: HfRollout, weights: Weights, version: int) -> None:
    rollout.begin_weight_update(specs(weights), version)
    for bucket in buckets(weights):
        rollout.load_bucket(bucket)
    rollout.finish_weight_update()


@pytest.fixture
def rows(prompts: MakePrompts) -> Rows:
    """What a rollout generates for two prompts: all tokens, and their log-probabilities."""

    def of(rollout: HfRollout) -> tuple[torch.Tensor, torch.Tensor]:
        out = rollout.generate(prompts([5, 6, 7], [9]), SAMPLING)
        return out["input_ids"].values(), out["rollout_log_probs"].values()

    return of


def version(rollout: HfRollout) -> int | None:
    return rollout.weight_version


def same(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("family", "options"), FAMILIES.values(), ids=FAMILIES.keys())
def test_an_update_makes_it_exactly_the_other_model(
    checkpoints: Checkpoints, rows: Rows, prompts: MakePrompts, family: str, options: dict[str, Any]
) -> None:
    rollout, other = (ready(checkpoints(family, seed, **options)) for seed in (1, 2))
    before, want = rows(rollout), rows(other)
    assert not same(before, want)
    update(rollout, saved(checkpoints(family, 2, **options)), version=3)
    assert version(rollout) == 3
    assert same(rows(rollout), want)
    assert rollout.generate(prompts([5]), SAMPLING)["weight_version"].tolist() == [3, 3]
    # And back, after the memory was given away in between.
    rollout.release(["weights", "kv_cache"])
    rollout.resume(["weights", "kv_cache"])
    update(rollout, saved(checkpoints(family, 1, **options)), version=4)
    assert same(rows(rollout), before)


def test_tied_weights_stay_tied_and_come_once(checkpoints: Checkpoints) -> None:
    directory = checkpoints("qwen3", 2, tie_word_embeddings=True)
    rollout = ready(checkpoints("qwen3", 1, tie_word_embeddings=True))
    weights = saved(directory)
    assert "lm_head.weight" not in weights
    rollout.release(["weights"])
    rollout.resume(["weights"])
    update(rollout, weights, 1)
    assert rollout._model.lm_head.weight is rollout._model.model.embed_tokens.weight
    with pytest.raises(Refused, match=r"1 unexpected[\s\S]*lm_head\.weight"):
        rollout.begin_weight_update([*specs(weights), WeightSpec("lm_head.weight", (64, 64), "float32")], 2)
    assert version(rollout) == 1


def test_weights_of_another_precision_are_cast(checkpoints: Checkpoints, rows: Rows) -> None:
    rollout = ready(checkpoints(seed=1), dtype="bfloat16")
    update(rollout, saved(checkpoints(seed=2)), 1)
    assert same(rows(rollout), rows(ready(checkpoints(seed=2), dtype="bfloat16")))


def test_tensors_may_be_reused_after_load_bucket(checkpoints: Checkpoints, rows: Rows) -> None:
    rollout, weights = ready(checkpoints(seed=1)), saved(checkpoints(seed=2))
    rollout.begin_weight_update(specs(weights), 1)
    for bucket in buckets(weights):
        rollout.load_bucket(bucket)
        for _, tensor in bucket:
            tensor.fill_(torch.nan)
    rollout.finish_weight_update()
    assert same(rows(rollout), rows(ready(checkpoints(seed=2))))


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
    checkpoints: Checkpoints, rows: Rows, spoil: Callable[[Weights], Weights], message: str
) -> None:
    rollout = ready(checkpoints(seed=1))
    before = rows(rollout)
    with pytest.raises(Refused, match=message):
        rollout.begin_weight_update(specs(spoil(saved(checkpoints(seed=2)))), 1)
    assert version(rollout) == 0
    assert same(rows(rollout), before)


def test_names_sent_twice_are_refused(checkpoints: Checkpoints) -> None:
    rollout, weights = ready(checkpoints(seed=1)), specs(saved(checkpoints(seed=2)))
    with pytest.raises(Refused, match="1 doubled"):
        rollout.begin_weight_update([*weights, weights[0]], 1)


def test_a_model_whose_checkpoint_is_computed_is_refused_before_anything_changes(
    checkpoints: Checkpoints, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    def computed(model: Any, state: Weights) -> Weights:
        return state | {"model.norm.weight": state["model.norm.weight"] + 1}

    monkeypatch.setattr(sdk.parts.saved_form, "revert_weight_conversion", computed)
    rollout = ready(checkpoints(seed=1))
    with pytest.raises(Refused, match=r"cannot be loaded tensor by tensor[\s\S]*model\.norm\.weight"):
        rollout.begin_weight_update(specs(saved(checkpoints(seed=1))), 1)
    assert version(rollout) == 0
    rows(rollout)


def test_an_update_that_stays_incomplete_leaves_no_version(
    checkpoints: Checkpoints, rows: Rows, prompts: MakePrompts
) -> None:
    rollout, weights = ready(checkpoints(seed=1)), saved(checkpoints(seed=2))
    rollout.begin_weight_update(specs(weights), 1)
    assert version(rollout) is None
    first, *rest = buckets(weights)
    for bucket in rest:
        rollout.load_bucket(bucket)
    with pytest.raises(Refused, match=rf"3 of the weights[\s\S]*{first[0][0]}"):
        rollout.finish_weight_update()
    assert version(rollout) is None
    with pytest.raises(Refused, match=r"no valid weights[\s\S]*a weight update under way"):
        rollout.generate(prompts([5]), SAMPLING)
    rollout.load_bucket(first)
    rollout.finish_weight_update()
    assert same(rows(rollout), rows(ready(checkpoints(seed=2))))


def test_an_aborted_update_leaves_no_version_and_the_next_one_is_whole(
    checkpoints: Checkpoints, rows: Rows, prompts: MakePrompts
) -> None:
    rollout, weights = ready(checkpoints(seed=1)), saved(checkpoints(seed=2))
    rollout.begin_weight_update(specs(weights), 1)
    rollout.load_bucket(next(buckets(weights)))
    rollout.abort_weight_update()
    assert version(rollout) is None
    with pytest.raises(Refused, match="no valid weights"):
        rollout.generate(prompts([5]), SAMPLING)
    with pytest.raises(Refused, match="no weight update is under way"):
        rollout.load_bucket(next(buckets(weights)))
    with pytest.raises(Refused, match="no weight update is under way"):
        rollout.finish_weight_update()
    rollout.begin_weight_update(specs(weights), 2)  # an update that nobody finished is forgotten by the next
    rollout.load_bucket(next(buckets(weights)))
    update(rollout, weights, 3)
    assert version(rollout) == 3
    assert same(rows(rollout), rows(ready(checkpoints(seed=2))))


def test_an_update_that_is_aborted_before_a_bucket_came_leaves_the_old_weights_whole(
    checkpoints: Checkpoints, rows: Rows
) -> None:
    rollout, weights = ready(checkpoints(seed=1)), saved(checkpoints(seed=2))
    for number in (1, 2):  # one that nobody finished too
        rollout.begin_weight_update(specs(weights), number)
    assert version(rollout) is None
    rollout.abort_weight_update()
    assert version(rollout) == 0
    assert same(rows(rollout), rows(ready(checkpoints(seed=1))))


def test_a_bad_bucket_is_refused_as_a_whole(checkpoints: Checkpoints, rows: Rows) -> None:
    rollout, weights = ready(checkpoints(seed=1)), saved(checkpoints(seed=2))
    rollout.begin_weight_update(specs(weights), 1)
    name = "model.norm.weight"
    other = "model.embed_tokens.weight"
    for bad in (
        [(other, weights[other]), ("model.strange", torch.ones(1))],
        [(other, weights[other]), (name, torch.ones(63))],
        [(other, weights[other]), (name, torch.ones(64, dtype=torch.int32))],
        [(other, weights[other]), (other, weights[other])],
    ):
        with pytest.raises(Refused, match="bucket"):
            rollout.load_bucket(bad)
    rollout.load_bucket([(name, weights[name])])
    with pytest.raises(Refused, match=name):
        rollout.load_bucket([(name, weights[name])])
    for bucket in buckets({key: t for key, t in weights.items() if key != name}):
        rollout.load_bucket(bucket)
    rollout.finish_weight_update()
    assert same(rows(rollout), rows(ready(checkpoints(seed=2))))


def test_min_version_refuses_weights_that_are_too_old(checkpoints: Checkpoints, prompts: MakePrompts) -> None:
    rollout = ready(checkpoints(seed=1))
    update(rollout, saved(checkpoints(seed=2)), 4)
    rollout.generate(prompts([5]), SAMPLING, min_version=4)
    with pytest.raises(Refused, match=r"too old[\s\S]*version 4[\s\S]*version 5"):
        rollout.generate(prompts([5]), SAMPLING, min_version=5)
    assert version(rollout) == 4


def parameter_bytes(rollout: HfRollout) -> int:
    return sum(p.untyped_storage().nbytes() for p in rollout._model.parameters())


def test_released_weights_hold_no_memory_and_wait_for_a_whole_update(
    checkpoints: Checkpoints, rows: Rows, prompts: MakePrompts
) -> None:
    rollout, weights = ready(checkpoints(seed=1)), saved(checkpoints(seed=2))
    held = parameter_bytes(rollout)
    rollout.release(["kv_cache"])
    assert version(rollout) == 0
    rollout.release(["weights"])
    rollout.release(["weights"])
    assert (parameter_bytes(rollout), version(rollout)) == (0, None)
    with pytest.raises(Refused, match=r"no valid weights[\s\S]*released"):
        rollout.generate(prompts([5]), SAMPLING)
    with pytest.raises(Refused, match=r"resume\(\['weights'\]\)"):
        rollout.begin_weight_update(specs(weights), 1)
    rollout.resume(["weights"])
    assert (parameter_bytes(rollout), version(rollout)) == (held, None)
    with pytest.raises(Refused, match="no valid weights"):
        rollout.generate(prompts([5]), SAMPLING)
    update(rollout, weights, 1)
    assert same(rows(rollout), rows(ready(checkpoints(seed=2))))


def test_a_release_in_the_middle_of_an_update_ends_the_update(checkpoints: Checkpoints) -> None:
    rollout, weights = ready(checkpoints(seed=1)), saved(checkpoints(seed=2))
    rollout.begin_weight_update(specs(weights), 1)
    rollout.release(["weights"])
    with pytest.raises(Refused, match="no weight update is under way"):
        rollout.load_bucket(next(buckets(weights)))


def test_unknown_tags_are_refused(checkpoints: Checkpoints) -> None:
    rollout = ready(checkpoints(seed=1))
    with pytest.raises(Refused, match="optimizer"):
        rollout.release(["weights", "optimizer"])  # type: ignore[list-item]
    assert version(rollout) == 0


def test_nothing_works_before_initialize_nor_after_shutdown(checkpoints: Checkpoints, prompts: MakePrompts) -> None:
    rollout = HfRollout(HfRolloutConfig(checkpoints(seed=1)), device="cpu")
    for _ in range(2):
        assert version(rollout) is None
        with pytest.raises(Refused, match="not initialized"):
            rollout.generate(prompts([5]), SAMPLING)
        for call in (
            lambda: rollout.begin_weight_update([], 1),
            lambda: rollout.release(["weights"]),
            lambda: rollout.resume(["weights"]),
        ):
            with pytest.raises(Refused, match=r"initialize\(\)"):
                call()
        rollout.initialize()
        rollout.generate(prompts([5]), SAMPLING)
        rollout.shutdown()
