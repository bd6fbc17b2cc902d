"""A task small enough to be learnt on two CPU cores within a minute: copy four digits.

Everything is made on the spot: a two-layer model of random weights, its tokenizer, and the prompts.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

DIGITS = "0123456789"
BOS, EOS, SEP, PAD = "<bos>", "<eos>", "<sep>", "<pad>"
VOCABULARY = [*DIGITS, BOS, EOS, SEP, PAD, "<unk>", "<unused>"]


def write_tokenizer(directory: str | Path) -> None:
    """A token for every digit; a prompt is put between BOS and SEP. AutoTokenizer loads it."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {token: i for i, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {SEP}", special_tokens=[(BOS, ids[BOS]), (SEP, ids[SEP])]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, sep_token=SEP, pad_token=PAD, unk_token="<unk>"
    ).save_pretrained(directory)


def write_model(directory: str | Path, *, seed: int = 0, hidden_size: int = 64, num_layers: int = 2) -> str:
    """A Qwen3 of random weights with the tokenizer beside it, written with save_pretrained.

    Returns:
        the directory, as a string.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        max_position_embeddings=128,
        tie_word_embeddings=True,  # a digit's way out is its way in: copying is learnt from more seeds
        bos_token_id=VOCABULARY.index(BOS),
        eos_token_id=VOCABULARY.index(EOS),
        pad_token_id=VOCABULARY.index(PAD),
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).save_pretrained(directory)
    write_tokenizer(directory)
    return str(directory)


def write_copy_task(path: str | Path, *, num_rows: int = 4096, num_digits: int = 4, seed: int = 0) -> str:
    """Prompts of random digits whose answer is the prompt, as JSONL.

    Returns:
        the path, as a string.
    """
    draw = random.Random(seed)
    with Path(path).open("w") as file:
        for _ in range(num_rows):
            digits = "".join(draw.choices(DIGITS, k=num_digits))
            file.write(json.dumps({"prompt": digits, "answer": digits}) + "\n")
    return str(path)
