"""Stands in for the wheel `sglang-kernel`, which there is for CUDA alone.

SGLang imports names from it also on a CPU, where dense models need one of them: it writes down which slots of the KV
cache a request has. All others raise when they are called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

if torch.cuda.is_available():
    raise ImportError("manymesh-sglang-standins is for machines without CUDA: install sglang-kernel instead")

__version__ = "0.4.10"  # what SGLang 0.5.23 asks for


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Row r of req_to_token gets the next slots of out_cache_loc at [start, end), for each request in turn."""
    lengths = (end_offset - start_offset).tolist()
    slots = out_cache_loc.to(req_to_token.dtype).split(lengths)
    for row, start, length, mine in zip(req_pool_indices.tolist(), start_offset.tolist(), lengths, slots, strict=True):
        req_to_token[row, start : start + length] = mine


def absent(name: str) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            f"{name} is a kernel of sglang-kernel; this is its stand-in for a CPU, which has none"
        )

    return call


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    return absent(f"sgl_kernel.{name}")
