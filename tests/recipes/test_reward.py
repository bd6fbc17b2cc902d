"""Rewards: the two that are ready, and what is said of a function that fails."""

from __future__ import annotations

import math
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.errors import ConfigError
from manymesh.recipes.grpo.reward import Reward, RewardConfig, RewardError, Row, digit_share, exact_match

ROWS = [{"prompt": f"p{i}", "answer": str(i)} for i in range(4)]
TEXTS = ["zero", "one", "two", "three"]


def reward_of(function: Any, **options: Any) -> Any:
    return Reward("mine:reward", function, options)


def test_exact_match_ignores_white_space_at_the_ends_and_takes_numbers() -> None:
    rows: list[Row] = [{"answer": "7"}, {"answer": 7}, {"answer": "7"}, {"answer": "a b"}]
    assert exact_match([" 7\n", "7", "77", "a  b"], rows) == [1, 1, 0, 0]
    assert exact_match(["x"], [{"label": "x"}], field="label") == [1]


@pytest.mark.parametrize(
    ("completion", "answer", "share"),
    [
        ("1234", "1234", 1.0),
        ("1 2, 3 and 4", "1234", 1.0),
        ("1235", "1234", 0.75),
        ("12", "1234", 0.5),
        ("12345", "1234", 0.8),
        ("2341", "1234", 0.0),
        ("", "1234", 0.0),
        ("none", "none", 0.0),
    ],
)
def test_digit_share_counts_right_digits_place_by_place(completion: str, answer: str, share: float) -> None:
    assert digit_share([completion], [{"answer": answer}]) == [pytest.approx(share)]


def test_a_function_is_found_by_its_dotted_name_and_gets_its_options() -> None:
    config = RewardConfig("manymesh.recipes.grpo.reward:exact_match", {"field": "prompt"})
    assert Reward.load(config)(["p0", "p0"], ROWS[:2]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (RewardConfig("exact_match"), "module:function"),
        (RewardConfig("no_such_module_at_all:f"), "cannot import"),
        (RewardConfig("manymesh.recipes.grpo.reward:exact_mach"), "exact_match"),
        (RewardConfig("manymesh.recipes.grpo.reward:exact_match", {"fild": "x"}), "fild"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_at_load(config: RewardConfig, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Reward.load(config)
    assert says in str(refused.value)
    assert "reward.function" in str(refused.value)


def test_a_reward_module_that_fails_at_import_is_named_with_its_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken_reward.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="broken_reward") as refused:
        Reward.load(RewardConfig("broken_reward:f"))
    assert "ZeroDivisionError" in str(refused.value.have)


def test_a_function_that_raises_is_reported_with_function_row_and_completion() -> None:
    def reward(completions: list[str], rows: Any) -> Any:
        return [1 / (row["answer"] != "2") for row in rows]

    with pytest.raises(RewardError) as error_info:
        reward_of(reward)(TEXTS, ROWS)
    text = str(error_info.value)
    for part in ("mine:reward", "row 2 of the batch", "'p2'", "'two'", "ZeroDivisionError"):
        assert part in text
    assert isinstance(error_info.value.__cause__, ZeroDivisionError)


def test_a_function_that_fails_only_on_the_whole_batch_is_reported_as_such() -> None:
    def reward(completions: list[str], rows: Any) -> Any:
        if len(rows) > 1:
            raise MemoryError("too many")
        return [0.0]

    with pytest.raises(RewardError, match="4 completions, though on none alone"):
        reward_of(reward)(TEXTS, ROWS)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None, "0.5", [1.0]])
def test_a_value_that_is_no_finite_number_is_reported_with_function_row_and_completion(bad: Any) -> None:
    with pytest.raises(RewardError) as error_info:
        reward_of(lambda completions, rows: [1.0, bad, 1.0, 1.0])(TEXTS, ROWS)
    text = str(error_info.value)
    for part in ("mine:reward", "row 1", "'p1'", "'one'", repr(bad)):
        assert part in text


@pytest.mark.parametrize(("result", "have"), [([1.0], 1), ([], 0), (None, "None"), (0.5, "0.5")])
def test_another_number_of_rewards_is_reported(result: Any, have: Any) -> None:
    with pytest.raises(RewardError) as error_info:
        reward_of(lambda completions, rows: result)(TEXTS, ROWS)
    assert error_info.value.have == have
    assert "4, one for each completion" in str(error_info.value.want)


@pytest.mark.parametrize("as_type", [np.array, torch.tensor, tuple, iter])
def test_arrays_tensors_and_iterators_of_numbers_are_taken(as_type: Any) -> None:
    assert reward_of(lambda c, r: as_type([0.5, 1.0, 0.0, 2.0]))(TEXTS, ROWS) == [0.5, 1.0, 0.0, 2.0]


def test_bool_rewards_are_numbers() -> None:
    assert reward_of(lambda c, r: [True, False, True, False])(TEXTS, ROWS) == [1.0, 0.0, 1.0, 0.0]


def test_a_module_made_at_run_time_can_hold_the_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("my_rewards")
    vars(module)["length"] = lambda completions, rows: [len(c) for c in completions]
    monkeypatch.setitem(sys.modules, "my_rewards", module)
    assert Reward.load(RewardConfig("my_rewards:length"))(TEXTS, ROWS) == [4.0, 3.0, 3.0, 5.0]
