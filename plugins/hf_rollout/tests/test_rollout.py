"""What is this rollout's own: batches cut in parts, weights written in place, memory that is dropped."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import manymesh.parts.saved_form
from core.errors import Refused
from core.rollout import SamplingParams
from manymesh_hf.config import HfRolloutConfig
from manymesh_hf.rollout import HfRollout
from sdk.conformance.suites.rollout_base import Models, Weights, prompts, responses, specs, update

SAMPLING = SamplingParams(num_samples=3, max_new_tokens=10, seed=42)
PROMPTS = [[1, 5, 6], [7], [40, 41, 42, 43], [9, 9], [1, 5, 6], [12, 13, 14, 15, 16, 17]]


@pytest.fixture(scope="session")
def models(conformance_session: Any) -> Models:
    return Models(conformance_session)


def ready(directory: object, **options: Any) -> HfRollout:
    rollout = HfRollout(HfRolloutConfig(str(directory), **options), device="cpu")
    rollout.initialize()
    return rollout


def rows(rollout: HfRollout) -> list[list[int]]:
    return responses(rollout.generate(prompts(*PROMPTS), SAMPLING))


def test_a_rows_samples_dont_depend_on_how_many_run_at_once(models: Models) -> None:
    whole = rows(ready(models.directory(1)))
    for max_batch_rows in (1, 4, 100):
        assert rows(ready(models.directory(1), max_batch_rows=max_batch_rows)) == whole


def test_stop_strings_that_the_tokenizer_cannot_give_are_refused(models: Models, tmp_path: Path) -> None:
    def generate(rollout: HfRollout, stop: str) -> TensorDict:
        return rollout.generate(prompts([5]), SamplingParams(max_new_tokens=4, stop=(stop,)))

    with pytest.raises(Refused, match="no token of the tokenizer can end"):
        generate(ready(models.directory(1)), "!")
    without = shutil.copytree(models.directory(1), tmp_path / "copy", ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(Refused, match="need a tokenizer"):
        generate(ready(without), "a")


def test_what_transformers_cannot_load_is_refused(models: Models, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="attn_implementation"):
        ready(models.directory(1), attn_implementation="no_such_kernel")
    copy = shutil.copytree(models.directory(1), tmp_path / "copy")
    (copy / "model.safetensors").unlink()
    with pytest.raises(Refused, match="cannot load"):
        ready(copy)


def test_a_model_in_bfloat16_takes_weights_in_float32(models: Models) -> None:
    halves = ready(models.directory(1), dtype="bfloat16")
    update(halves, models.weights(2), 1)
    assert rows(halves) == rows(ready(models.directory(2), dtype="bfloat16"))


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), ("cuda", "bfloat16")])
def test_what_is_left_to_the_device_is_settled_where_the_rollout_is_built(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: str
) -> None:
    monkeypatch.setattr("manymesh.parts.base_rollout.choose_device", lambda _: torch.device(device))
    assert HfRollout(HfRolloutConfig("x"))._config.dtype == dtype
    assert HfRollout(HfRolloutConfig("x", dtype="float16"))._config.dtype == "float16"


def test_tied_weights_stay_tied(models: Models) -> None:
    rollout = ready(models.directory(1, tie_word_embeddings=True))
    rollout.release(["weights"])
    rollout.resume(["weights"])
    update(rollout, models.weights(2, tie_word_embeddings=True), 1)
    assert rollout._model.lm_head.weight is rollout._model.model.embed_tokens.weight


def test_a_model_whose_checkpoint_is_computed_is_refused_before_anything_changes(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    def computed(model: Any, state: Weights) -> Weights:
        return state | {"model.norm.weight": state["model.norm.weight"] + 1}

    monkeypatch.setattr(manymesh.parts.saved_form, "revert_weight_conversion", computed)
    rollout = ready(models.directory(1))
    with pytest.raises(Refused, match=r"cannot be loaded tensor by tensor[\s\S]*model\.norm\.weight"):
        rollout.begin_weight_update(specs(models.weights(1)), 1)
    assert rollout.weight_version == 0
    rows(rollout)


def test_an_update_that_is_aborted_before_a_bucket_came_leaves_the_old_version(models: Models) -> None:
    rollout = ready(models.directory(1))
    for number in (1, 2):  # one that nobody finished too
        rollout.begin_weight_update(specs(models.weights(2)), number)
    assert rollout.weight_version is None
    rollout.abort_weight_update()
    assert rollout.weight_version == 0
    assert rows(rollout) == rows(ready(models.directory(1)))


def test_released_weights_hold_no_memory(models: Models) -> None:
    rollout = ready(models.directory(1))

    def held() -> int:
        return sum(p.untyped_storage().nbytes() for p in rollout._model.parameters())

    before = held()
    rollout.release(["weights"])
    assert held() == 0
    rollout.resume(["weights"])
    assert held() == before


def test_it_can_be_initialized_again_after_shutdown(models: Models) -> None:
    rollout = ready(models.directory(1))
    first = rows(rollout)
    update(rollout, models.weights(2), 1)
    rollout.shutdown()
    rollout.initialize()
    assert (rows(rollout), rollout.weight_version) == (first, 0)
