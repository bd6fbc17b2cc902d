"""The optimizer that engines share: what it refuses to step."""

from __future__ import annotations

import pytest
import torch

from core.config import OptimizerConfig
from core.errors import Refused
from manymesh.parts.adamw import ScheduledAdamW


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_are_refused_since_small_steps_would_change_none(dtype: torch.dtype) -> None:
    parameters = {"a": torch.nn.Parameter(torch.ones(2, 2)), "b": torch.nn.Parameter(torch.ones(2, 2, dtype=dtype))}
    with pytest.raises(Refused, match=str(dtype)) as refused:
        ScheduledAdamW(parameters, OptimizerConfig())
    assert "float32" in refused.value.mend
    ScheduledAdamW({"a": parameters["a"]}, OptimizerConfig())
