"""A bucket of tensors as one run of bytes, in the form that SGLang calls "flattened_bucket"."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Named = tuple[str, torch.Tensor]


def flatten(bucket: Sequence[Named]) -> tuple[list[Named], torch.Tensor]:
    """The bucket with its widest dtypes first, so that none begins off its own boundary, and its bytes (uint8)."""
    ordered = sorted(bucket, key=lambda each: -each[1].dtype.itemsize)
    chunks = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for _, tensor in ordered]
    return ordered, torch.cat(chunks)


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
