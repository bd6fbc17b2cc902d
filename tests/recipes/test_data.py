"""Prompts: files that are wrong, chat and plain text, and epochs that need no state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import Refused
from manymesh.recipes.grpo.data import DataConfig, PromptData, load_tokenizer, read_jsonl, stream_rows, tokenize
from manymesh.recipes.toy import VOCABULARY

BOS, SEP = VOCABULARY.index("<bos>"), VOCABULARY.index("<sep>")
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}9{% endif %}"


@pytest.fixture
def chat_tokenizer(toy: Path) -> Any:
    tokenizer = load_tokenizer(str(toy / "model"))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write(path: Path, *lines: Any) -> Any:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": "1"', "is not JSON"),
        ("[1, 2]", "is no JSON object"),
        ({"question": "1"}, "has no field 'prompt'"),
        ({"prompt": ""}, "is no prompt"),
        ({"prompt": []}, "is no prompt"),
        ({"prompt": 7}, "is no prompt"),
        ({"prompt": ["hello"]}, "is no prompt"),
        ({"prompt": [{"role": "user"}]}, "is no prompt"),
    ],
)
def test_a_wrong_line_is_named_with_its_file_and_number(tmp_path: Path, line: Any, says: str) -> None:
    file = write(tmp_path / "data.jsonl", {"prompt": "1"}, "", line)
    with pytest.raises(Refused, match=says) as refused:
        read_jsonl(file)
    assert f"{file}:3" in refused.value.message


def test_a_file_that_is_missing_or_holds_nothing_or_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="cannot read the data file"):
        read_jsonl(tmp_path / "none.jsonl")
    with pytest.raises(Refused, match="holds no rows"):
        read_jsonl(write(tmp_path / "empty.jsonl", "", "  "))
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(Refused, match="cannot read the data file"):
        read_jsonl(tmp_path / "binary.jsonl")


def test_blank_lines_are_skipped_and_all_fields_kept(tmp_path: Path) -> None:
    rows = read_jsonl(write(tmp_path / "d.jsonl", {"q": "1", "answer": 1}, "", {"q": "2", "x": [1]}), prompt="q")
    assert rows == [{"q": "1", "answer": 1}, {"q": "2", "x": [1]}]


def test_plain_text_is_tokenised_as_the_tokenizer_does(tokenizer: Any) -> None:
    assert tokenize(["12", "345"], tokenizer) == [[BOS, 1, 2, SEP], [BOS, 3, 4, 5, SEP]]


def test_messages_go_through_the_chat_template_up_to_the_assistant_s_turn(chat_tokenizer: Any) -> None:
    messages: Any = [{"role": "system", "content": "1"}, {"role": "user", "content": "2"}]
    plain, chat, string = tokenize(["5", messages, "7"], chat_tokenizer)
    assert plain == [BOS, 5, SEP]
    assert [each for each in chat if each < 10] == [1, 2, 9]
    assert tokenize(["7"], chat_tokenizer, chat=True)[0] != string
    assert [each for each in tokenize(["7"], chat_tokenizer, chat=True)[0] if each < 10] == [7, 9]


def test_messages_without_a_chat_template_are_refused(tokenizer: Any) -> None:
    with pytest.raises(Refused, match="no chat template"):
        tokenize(["7"], tokenizer, chat=True)
    with pytest.raises(Refused, match="no chat template"):
        tokenize([[{"role": "user", "content": "7"}]], tokenizer)


def test_a_template_that_raises_is_refused_with_its_own_words(chat_tokenizer: Any) -> None:
    chat_tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(Refused) as refused:
        tokenize([[{"role": "user", "content": "7"}]], chat_tokenizer)
    assert "roles must alternate" in str(refused.value)


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="has no tokenizer"):
        load_tokenizer(str(tmp_path))


def test_overlong_prompts_are_refused_or_dropped(tmp_path: Path, tokenizer: Any) -> None:
    file = str(write(tmp_path / "d.jsonl", {"prompt": "1"}, {"prompt": "12345"}, {"prompt": "2"}))
    with pytest.raises(Refused, match="1 prompts") as refused:
        PromptData.load(DataConfig(file, max_prompt_tokens=4), tokenizer)
    assert "7 tokens in row 2" in str(refused.value.have)
    data = PromptData.load(DataConfig(file, max_prompt_tokens=4, overlong="drop"), tokenizer)
    assert ([row["prompt"] for row in data.rows], data.num_dropped) == (["1", "2"], 1)
    with pytest.raises(Refused):
        PromptData.load(DataConfig(file, max_prompt_tokens=1, overlong="drop"), tokenizer)


def test_a_step_s_batch_holds_the_tokens_of_its_rows(toy: Path, tokenizer: Any) -> None:
    data = PromptData.load(DataConfig(str(toy / "copy.jsonl")), tokenizer)
    batch, row_of = data.batch(3, 8)
    assert batch["prompt_id"].tolist() == list(row_of) == list(range(24, 32))
    for ids, row in zip(batch["prompt_ids"].unbind(), row_of.values(), strict=True):
        assert ids.tolist() == [BOS, *map(int, row["prompt"]), SEP]


@settings(max_examples=50, deadline=None)
@given(num_rows=st.integers(1, 20), per_step=st.integers(1, 25), seed=st.integers(0, 5))
def test_every_epoch_holds_every_row_once_whatever_the_size_of_a_step(num_rows: int, per_step: int, seed: int) -> None:
    num_steps = -(-3 * num_rows // per_step)
    parts = [stream_rows(np.arange(s * per_step, (s + 1) * per_step), num_rows, seed) for s in range(num_steps)]
    stream = np.concatenate(parts)[: 3 * num_rows].reshape(3, num_rows)
    assert (np.sort(stream, axis=1) == np.arange(num_rows)).all()


def test_the_order_of_rows_is_a_function_of_seed_and_step_and_differs_by_epoch(toy: Path, tokenizer: Any) -> None:
    def prompts(seed: int, step: int, **options: Any) -> Any:
        data = PromptData.load(DataConfig(str(toy / "copy.jsonl"), seed=seed, **options), tokenizer)
        return [row["prompt"] for row in data.batch(step, 50)[1].values()]

    assert prompts(1, 4) == prompts(1, 4)
    assert prompts(1, 4) != prompts(1, 5)
    assert prompts(1, 4) != prompts(2, 4)
    assert prompts(1, 4, shuffle=False) == prompts(1, 5, shuffle=False)
