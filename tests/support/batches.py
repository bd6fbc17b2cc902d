"""Batches that tests train on."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from core.batch import jagged_from


def training_batch(num_rows: int = 8, seed: int = 0) -> TensorDict:
    """Rows of very unequal length, from 3 to 60 tokens."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.linspace(3, 60, num_rows).long()[torch.randperm(num_rows, generator=random)]
    total = int(lengths.sum())
    ids: Any = jagged_from(torch.randint(3, 64, (total,), generator=random), lengths)

    def column(values: torch.Tensor) -> torch.Tensor:
        return torch.nested.nested_tensor_from_jagged(values, ids.offsets())

    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
    columns = {
        "input_ids": ids,
        "response_mask": column(positions >= 2),
        "old_log_probs": column(-4 + torch.rand(total, generator=random)),
        "ref_log_probs": column(-4 + torch.rand(total, generator=random)),
        "advantages": column(torch.randn(total, generator=random)),
    }
    return TensorDict(columns, batch_size=[num_rows])
