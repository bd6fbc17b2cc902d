"""The attention without TransformerEngine, on one rank: what is asked of torch's kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from manymesh_megatron.modules import Attention


def test_a_mask_comes_with_as_many_key_value_heads_as_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's kernels that hold no tokens x tokens take either a mask or fewer key-value heads."""
    asked: list[dict[str, Any]] = []
    kernel = F.scaled_dot_product_attention

    def spy(*args: torch.Tensor, **options: Any) -> torch.Tensor:
        asked.append({"mask": options["attn_mask"] is not None, "gqa": options["enable_gqa"]})
        return kernel(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    attention: Any = SimpleNamespace(_scale=0.3)
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    masked, unmasked = (Attention._attend(attention, q, k, v, mask) for mask in (causal, None))
    torch.testing.assert_close(masked, unmasked, atol=1e-6, rtol=1e-6)
    assert asked == [{"mask": True, "gqa": False}, {"mask": False, "gqa": True}]
