"""Writing a policy's weights as a Hugging Face directory, one shard of the model in memory at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch

from core.errors import Refused
from manymesh.parts.agreement import agree

SHARD_BYTES = 5 << 30  # as save_pretrained cuts them
# What a directory holds beside its weights: config, tokenizer, chat template, custom code.
KEEP = ("*.json", "*.jinja", "*.txt", "*.model", "*.py", "tokenizer*", "vocab*")


def export_directory(
    stream: Iterable[tuple[str, torch.Tensor]], source: str, path: str, writes: bool, shard_bytes: int = SHARD_BYTES
) -> None:
    """Collective: write `path` from full tensors, with everything but the weights from the directory `source`.

    Args:
        stream: names and tensors as save_pretrained has them; every rank iterates to the end.
        writes: whether this rank is the one that writes.

    Raises:
        Refused: on all ranks, where it could not be written; then `path` is not there.
    """
    final = Path(path).absolute()
    partial = final.with_name(final.name + ".partial")
    problem: Refused | None = None
    try:
        if writes:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            _write(stream, Path(source).expanduser(), partial, shard_bytes)
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
    except OSError as error:
        what = f"{type(error).__name__}: {error}"
        problem = Refused(f"cannot write the model to {str(final)!r}", have=what, where=str(final))
        shutil.rmtree(partial, ignore_errors=True)
    for _ in stream:  # the others wait in its collectives
        pass
    agree(None, problem)


def _write(stream: Iterable[tuple[str, torch.Tensor]], source: Path, directory: Path, shard_bytes: int) -> None:
    from safetensors.torch import save_file

    for file in {file for pattern in KEEP for file in source.glob(pattern) if "safetensors" not in file.name}:
        shutil.copy2(file, directory)
    shards: list[list[str]] = []
    tensors: dict[str, torch.Tensor] = {}
    total = size = 0

    def flush() -> None:
        shards.append(list(tensors))
        save_file(tensors, directory / f"shard-{len(shards)}", metadata={"format": "pt"})
        tensors.clear()

    for name, tensor in stream:
        if tensors and size + tensor.nbytes > shard_bytes:
            flush()
            size = 0
        tensors[name] = tensor.detach().cpu().contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
    if len(shards) == 1:
        (directory / "shard-1").rename(directory / "model.safetensors")
        return
    places: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        shard = f"model-{number:05}-of-{len(shards):05}.safetensors"
        (directory / f"shard-{number}").rename(directory / shard)
        places |= dict.fromkeys(names, shard)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
