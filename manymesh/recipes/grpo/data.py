"""Prompts: read from JSONL, tokenised once, dealt in shuffled epochs that are a pure function of seed and step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np
import torch
from tensordict import TensorDict

from core.batch import jagged_from, response_lengths, response_tokens, row_lengths, select
from core.errors import Refused
from core.model_facts import ModelFacts


@attrs.frozen
class DataConfig:
    path: str  # JSONL: one object a line, with the prompt and whatever the reward wants
    prompt: str = "prompt"  # name of the prompt's field: a string, or a list of chat messages
    chat: bool = False  # a string is a user's message, put into the tokenizer's chat template
    shuffle: bool = True  # anew each epoch
    seed: int = 0
    max_prompt_tokens: int | None = None
    overlong: Literal["refuse", "drop"] = "refuse"  # what to do with prompts beyond max_prompt_tokens


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken", "spiece.model")


def load_tokenizer(directory: str) -> Any:
    """The tokenizer saved in a model's directory.

    Raises:
        Refused: there is none that transformers can read.
    """
    from transformers import AutoTokenizer

    # Where there is none, transformers makes an empty one of the model's family.
    folder = Path(directory).expanduser()
    if folder.is_dir() and not any(True for name in TOKENIZER_FILES for _ in folder.glob(name)):
        raise Refused(
            f"the model directory {directory!r} has no tokenizer",
            have=sorted(entry.name for entry in folder.iterdir())[:12],
            want=f"one of {', '.join(TOKENIZER_FILES)}",
            mend="save the tokenizer beside the model: tokenizer.save_pretrained(directory)",
        )
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:
        raise Refused(
            f"cannot load a tokenizer from {directory!r}",
            have=f"{type(error).__name__}: {error}",
            mend="save the tokenizer beside the model: tokenizer.save_pretrained(directory)",
        ) from error


def read_jsonl(path: str | Path, prompt: str = "prompt") -> list[dict[str, Any]]:
    """Rows of a JSONL file, in order; blank lines are skipped.

    Raises:
        Refused: with file and line: not JSON, not an object, or a prompt that is missing, empty or of
        another form.
    """
    rows = []
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    rows.append(_read_row(line, prompt, f"{path}:{number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"cannot read the data file {str(path)!r}", have=error, mend="see data.path") from error
    if not rows:
        raise Refused(f"the data file {str(path)!r} holds no rows", want="one JSON object a line")
    return rows


def _read_row(line: str, prompt: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise Refused(f"{where} is not JSON", have=line.strip()[:200], where=f"{where}: {error}") from error
    if not isinstance(row, dict):
        raise Refused(f"{where} is no JSON object", have=line.strip()[:200], want=f'{{"{prompt}": ...}}')
    if prompt not in row:
        raise Refused(
            f"{where} has no field {prompt!r}",
            have=sorted(row),
            want=f"the prompt under {prompt!r}",
            mend="data.prompt names the field that holds the prompt",
        )
    value = row[prompt]
    if not value or not (isinstance(value, str) or _is_chat(value)):
        raise Refused(
            f"{where}: field {prompt!r} is no prompt",
            have=repr(value)[:200],
            want='text, or messages such as [{"role": "user", "content": "..."}], not empty',
        )
    return row


def _is_chat(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message for message in value
    )


def tokenize(
    prompts: Sequence[str | list[Mapping[str, Any]]], tokenizer: Any, *, chat: bool = False
) -> list[list[int]]:
    """Token ids of each prompt; messages go through the chat template and end where the assistant's turn
    begins.

    Raises:
        Refused: a chat template is needed and the tokenizer has none, or it refuses the messages.
    """
    as_chat = [i for i, prompt in enumerate(prompts) if chat or not isinstance(prompt, str)]
    as_text = [i for i, prompt in enumerate(prompts) if not chat and isinstance(prompt, str)]
    out: dict[int, list[int]] = {}
    if as_text:
        encoded = tokenizer([prompts[i] for i in as_text])["input_ids"]
        out.update(zip(as_text, encoded, strict=True))
    if as_chat:
        if not getattr(tokenizer, "chat_template", None):
            raise Refused(
                "the prompts are chat messages, but the tokenizer has no chat template",
                mend="give plain strings (data.chat: false), or a model whose tokenizer has a chat template",
            )
        talks = [
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            for prompt in (prompts[i] for i in as_chat)
        ]
        try:
            encoded = tokenizer.apply_chat_template(talks, tokenize=True, add_generation_prompt=True, return_dict=False)
        except Exception as error:
            raise Refused(
                "the tokenizer's chat template refuses the messages", have=f"{type(error).__name__}: {error}"
            ) from error
        out.update(zip(as_chat, encoded, strict=True))
    return [out[i] for i in range(len(prompts))]


@attrs.frozen(eq=False)
class PromptData:
    """Tokenised prompts and their rows, dealt by step.

    Prompts form one endless stream: epoch after epoch, each in an order of its own. Step s takes the
    `num_prompts` prompts from position s * num_prompts on, so a run resumes at any step without an
    iterator's state.
    """

    rows: list[dict[str, Any]]
    table: TensorDict  # column prompt_ids, jagged, by row
    seed: int = 0
    shuffle: bool = True
    num_dropped: int = 0

    @classmethod
    def load(cls, config: DataConfig, tokenizer: Any) -> PromptData:
        """Read and tokenise.

        Raises:
            Refused: see read_jsonl and tokenize; or a prompt that is longer than max_prompt_tokens.
        """
        rows = read_jsonl(config.path, config.prompt)
        ids = tokenize([row[config.prompt] for row in rows], tokenizer, chat=config.chat)
        limit = config.max_prompt_tokens
        fits = [bool(each) and (limit is None or len(each) <= limit) for each in ids]
        keep = [i for i, fit in enumerate(fits) if fit]
        if not all(fits) and (config.overlong == "refuse" or not keep):
            bad = fits.index(False)
            raise Refused(
                f"{fits.count(False)} prompts of {config.path} are empty or over data.max_prompt_tokens",
                have=f"{len(ids[bad])} tokens in row {bad + 1}: {str(rows[bad][config.prompt])[:80]!r}",
                want=f"1 to {limit} tokens" if limit else "at least one token",
                mend="raise data.max_prompt_tokens, or set data.overlong: drop",
            )
        values = torch.tensor([token for i in keep for token in ids[i]], dtype=torch.int64)
        lengths = torch.tensor([len(ids[i]) for i in keep])
        table = TensorDict({"prompt_ids": jagged_from(values, lengths)}, batch_size=[len(keep)])
        return cls([rows[i] for i in keep], table, config.seed, config.shuffle, len(ids) - len(keep))

    def check_fits(self, model: ModelFacts, max_new_tokens: int) -> None:
        """Raises Refused when a prompt and its response don't fit the model's context."""
        context, lengths = model.get("max_position_embeddings"), row_lengths(self.table)
        longest = int(lengths.max())
        if context is not None and longest + max_new_tokens > context:
            raise Refused(
                "a prompt leaves no room in the model's context for its response",
                have=f"{longest} tokens in prompt {int(lengths.argmax()) + 1}, {max_new_tokens} in its response",
                want=f"at most {context} together",
                where=model.path,
                mend=f"data.max_prompt_tokens={context - max_new_tokens} data.overlong=drop leaves such prompts out",
            )

    def batch(self, step: int, num_prompts: int) -> tuple[TensorDict, dict[int, dict[str, Any]]]:
        """The prompts of a step (counted from 0): columns prompt_ids (jagged) and prompt_id, and each prompt_id's row.

        prompt_id is the position in the stream: no two prompts of a run share it, even where a row comes again.
        """
        position = np.arange(step * num_prompts, (step + 1) * num_prompts)
        index = stream_rows(position, len(self.rows), self.seed if self.shuffle else None)
        batch = select(self.table, torch.from_numpy(index))
        batch.set("prompt_id", torch.from_numpy(position))
        return batch, {int(number): self.rows[i] for number, i in zip(position, index.tolist(), strict=True)}


def decode_responses(batch: TensorDict, tokenizer: Any) -> list[str]:
    """The text of every row's response tokens, without special tokens.

    Args:
        batch: `input_ids` and `response_mask`.
    """
    mask = batch["response_mask"]
    tokens, lengths = response_tokens(batch["input_ids"], mask), response_lengths(mask)
    by_row = [row.tolist() for row in tokens.split(lengths.tolist())]
    texts: list[str] = tokenizer.batch_decode(by_row, skip_special_tokens=True)
    return texts


def stream_rows(position: np.ndarray[Any, Any], num_rows: int, seed: int | None) -> np.ndarray[Any, Any]:
    """The row at each position of the endless stream; without a seed, rows stand in the file's order."""
    epoch, place = np.divmod(position, num_rows)
    if seed is None:
        return place
    out = np.empty_like(position)
    for number in np.unique(epoch):
        here = epoch == number
        out[here] = np.random.default_rng((seed, number)).permutation(num_rows)[place[here]]
    return out
