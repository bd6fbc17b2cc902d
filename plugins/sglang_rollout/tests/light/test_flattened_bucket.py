"""Buckets as runs of bytes."""

from __future__ import annotations

import torch

from manymesh_sglang.flattened_bucket import dtype_name, flatten


def test_a_bucket_is_its_tensors_bytes_with_the_widest_first_so_that_none_begins_off_its_boundary() -> None:
    narrow = torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16)
    wide = torch.arange(6, dtype=torch.float32).reshape(2, 3).t()  # not contiguous
    scalar = torch.tensor(7.0)
    ordered, flat = flatten([("narrow", narrow), ("wide", wide), ("scalar", scalar)])
    assert [name for name, _ in ordered] == ["wide", "scalar", "narrow"]
    assert [dtype_name(tensor) for _, tensor in ordered] == ["float32", "float32", "bfloat16"]
    at = 0
    for _, tensor in ordered:
        size = tensor.numel() * tensor.dtype.itemsize
        assert at % tensor.dtype.itemsize == 0
        assert torch.equal(flat[at : at + size].view(tensor.dtype).reshape(tensor.shape), tensor)
        at += size
    assert at == len(flat)
