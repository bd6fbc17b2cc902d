"""What an engine that speaks in lists has sampled becomes the contract's rows; ends of text; streams of randomness."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from core.batch import jagged, objects
from core.columns import GENERATED
from core.errors import Refused
from core.rollout import SamplingParams
from manymesh.parts.rollout_checks import check_tags, eos_ids, releasing, resume_memory, stop_ids, valid_version
from manymesh.parts.rollout_rows import answer, check_prompts, read_prompts, repeat_samples
from manymesh.parts.row_seeds import row_keys


def prompts(*rows: list[int]) -> TensorDict:
    batch = TensorDict({"row_weight": torch.arange(len(rows)).float()}, batch_size=[len(rows)])
    return read_prompts(batch.set("prompt_ids", jagged([torch.tensor(row) for row in rows])))


def test_responses_stand_behind_their_prompts_with_log_probs_on_what_was_sampled() -> None:
    repeated, sample = repeat_samples(prompts([5, 6], [7]), 2)
    assert sample.tolist() == [0, 1, 0, 1]
    tokens = [[10, 11], [12], [], [13, 14, 15]]
    log_probs = [[-1.0, -2.0], [-3.0], [], [-4.0, -5.0, -6.0]]
    reasons = ["stop", "length", "abort", "stop"]
    out = answer(repeated, tokens, log_probs, reasons, sampling=SamplingParams(temperature=0.7), weight_version=3)
    assert set(out.keys()) == GENERATED | {"rollout_temperature", "log_prob_kind"}
    rows = [row.tolist() for row in out["input_ids"].unbind()]
    assert rows == [[5, 6, 10, 11], [5, 6, 12], [7], [7, 13, 14, 15]]
    assert [row.tolist() for row in out["rollout_log_probs"].unbind()] == [
        [0, 0, -1, -2],
        [0, 0, -3],
        [0],
        [0, -4, -5, -6],
    ]
    assert [int(row.sum()) for row in out["response_mask"].unbind()] == [2, 1, 0, 3]
    assert (out["prompt_id"].tolist(), out["row_weight"].tolist()) == ([0, 0, 1, 1], [0, 0, 1, 1])
    assert objects(out.get("finish_reason")) == reasons
    assert (out["rollout_log_probs"] * out["response_mask"]).is_nested


def test_a_foreign_token_is_reported_with_its_row() -> None:
    with pytest.raises(Refused, match=r"prompt 2 has a token[\s\S]*-1\.\.9"):
        check_prompts(prompts([5, 6], [7], [8, -1], [9]), 64, None, 1)
    with pytest.raises(Refused, match="prompt 1 has a token"):
        check_prompts(prompts([5, 6], [64]), 64, None, 1)


def test_a_prompt_that_leaves_no_room_is_reported_with_its_row_and_the_lengths() -> None:
    with pytest.raises(Refused, match=r"prompt 1 leaves no room[\s\S]*250 tokens and max_new_tokens 7[\s\S]*256"):
        check_prompts(prompts([5], [6] * 250), 64, 256, 7)


def test_ends_are_of_the_generation_config_first_and_nested_configs_are_read(tmp_path: Path) -> None:
    assert eos_ids(str(tmp_path)) == ()
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": 4}}')
    assert eos_ids(str(tmp_path)) == (4,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 70]}')
    assert eos_ids(str(tmp_path)) == (2, 70)
    assert stop_ids(SamplingParams(stop_token_ids=(9,)), (2, 70), 64) == [2, 9]
    assert stop_ids(SamplingParams(stop_token_ids=(9,), ignore_eos=True), (2, 70), 64) == [9]
    with pytest.raises(Refused, match=r"\[64\]"):
        stop_ids(SamplingParams(stop_token_ids=(9, 64)), (), 64)


def test_weights_that_are_not_there_or_too_old_are_refused() -> None:
    assert valid_version(4, 4, "") == 4
    with pytest.raises(Refused, match=r"no valid weights[\s\S]*an update under way"):
        valid_version(None, None, "an update under way")
    with pytest.raises(Refused, match="too old"):
        valid_version(4, 5, "")
    with pytest.raises(Refused, match="optimizer"):
        check_tags(["weights", "optimizer"])


class KeepsMemory:
    """A rollout by its weights alone, which offers no release."""

    mesh: Any = None
    weight_version: int | None = 0

    def initialize(self) -> None: ...
    def shutdown(self) -> None: ...
    def generate(self, prompts: TensorDict, sampling: SamplingParams, *, min_version: int | None = None) -> Any: ...
    def begin_weight_update(self, specs: Any, version: int) -> None: ...
    def load_bucket(self, bucket: Any) -> None: ...
    def finish_weight_update(self) -> None: ...
    def abort_weight_update(self) -> None: ...


class Releases(KeepsMemory):
    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str]]] = []

    def release(self, tags: Sequence[str]) -> None:
        self.calls.append(("release", list(tags)))

    def resume(self, tags: Sequence[str]) -> None:
        self.calls.append(("resume", list(tags)))


def test_memory_is_asked_back_only_of_a_rollout_that_gives_it_away() -> None:
    keeps, releases = KeepsMemory(), Releases()
    with pytest.raises(Refused, match=r"cannot give its memory back[\s\S]*KeepsMemory[\s\S]*capability release"):
        releasing(keeps)
    resume_memory(keeps, ["weights"])  # it has it
    releasing(releases).release(["kv_cache", "weights"])
    resume_memory(releases, ["weights"])
    assert releases.calls == [("release", ["kv_cache", "weights"]), ("resume", ["weights"])]


def test_keys_differ_by_seed_prompt_and_sample_and_by_nothing_else() -> None:
    ids, samples = torch.arange(50).repeat_interleave(4), torch.arange(4).repeat(50)
    keys = row_keys(7, ids, samples)
    assert len(set(keys.tolist()) | set(row_keys(8, ids, samples).tolist())) == 400
    assert row_keys(7, ids[9:11], samples[9:11]).tolist() == keys[9:11].tolist()
