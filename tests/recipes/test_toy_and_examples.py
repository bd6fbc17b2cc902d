"""The demo's toy, and the example that takes a real model."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from manymesh.recipes.grpo.config import GrpoConfig
from manymesh.recipes.grpo.data import load_tokenizer, read_jsonl
from manymesh.recipes.grpo.placement import Placement
from manymesh.recipes.toy import VOCABULARY, write_copy_task, write_model
from manymesh.recipes.yaml_config import load_yaml, override

EXAMPLES = Path(__file__).parents[2] / "examples" / "grpo"


def test_the_toy_tokenizer_gives_every_digit_a_token_and_text_comes_back(tokenizer: Any) -> None:
    ids = tokenizer("0912")["input_ids"]
    assert [VOCABULARY[i] for i in ids] == ["<bos>", "0", "9", "1", "2", "<sep>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "0912"
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<eos>", "<pad>")


def test_toy_models_are_the_same_for_a_seed_and_differ_by_it(tmp_path: Path) -> None:
    def weights(seed: int, name: str) -> bytes:
        return (Path(write_model(tmp_path / name, seed=seed)) / "model.safetensors").read_bytes()

    assert weights(1, "a") == weights(1, "b") != weights(2, "c")
    assert load_tokenizer(str(tmp_path / "a")).eos_token_id == VOCABULARY.index("<eos>")


def test_the_copy_task_asks_for_the_prompt_itself(tmp_path: Path) -> None:
    rows = read_jsonl(write_copy_task(tmp_path / "a.jsonl", num_rows=20, seed=3))
    assert len(rows) == 20
    assert all(row["prompt"] == row["answer"] and len(row["prompt"]) == 4 for row in rows)
    assert rows == read_jsonl(write_copy_task(tmp_path / "b.jsonl", num_rows=20, seed=3))


def test_additions_are_right_and_the_same_at_every_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file in files:
        monkeypatch.setattr(sys, "argv", ["make_additions.py", "--out", str(file), "--rows", "50"])
        runpy.run_path(str(EXAMPLES / "make_additions.py"), run_name="__main__")
    assert files[0].read_text() == files[1].read_text()
    for row in map(json.loads, files[0].read_text().splitlines()):
        a, b = (int(word) for word in row["prompt"].split() if word.isdigit())
        assert row["answer"] == str(a + b)


def test_the_example_s_config_can_be_run_once_it_is_given_a_model(toy: Path) -> None:
    plain = override(load_yaml(EXAMPLES / "additions.yaml"), [f"model.path={toy / 'model'}"])
    config = GrpoConfig.of(plain)
    Placement(config).check()
    assert config.run.steps == 20


def test_the_example_of_parallel_parts_can_be_run_once_it_is_given_model_data_and_a_place(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", hidden_size=32)
    options = [f"model.path={model}", f"data.path={tmp_path / 'data.jsonl'}", f"run.dir={tmp_path / 'run'}"]
    config = GrpoConfig.of(override(load_yaml(EXAMPLES / "megatron.yaml"), options))
    Placement(config).check()
    assert (config.pool.world_size, config.actor.backend) == (4, "megatron")
