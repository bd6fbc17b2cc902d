"""What differs between CUDA and CPU, asked without CUDA: fused kernels, and what is refused where it isn't."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from core.errors import Refused
from manymesh_megatron.config import MegatronConfig
from manymesh_megatron.runtime import Runtime, fused

APEX = "fused_weight_gradient_mlp_cuda"


@pytest.mark.parametrize("there", [True, False])
def test_gradients_are_accumulated_in_products_where_apex_has_the_kernel(there: bool, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, APEX, ModuleType(APEX) if there else None)
    for transformer_engine in (True, False):
        assert fused(transformer_engine, True, trainable=True)["gradient_accumulation_fusion"] is there
        assert not fused(transformer_engine, True, trainable=False)["gradient_accumulation_fusion"], "without a buffer"
    assert not fused(False, False, trainable=True)["gradient_accumulation_fusion"], "on CPU"


def test_the_flex_dispatcher_is_refused_without_its_package(monkeypatch) -> None:
    with pytest.raises(Refused, match=r"flex[\s\S]*deep_ep[\s\S]*alltoall"):
        Runtime.choose(MegatronConfig("m", moe_dispatcher="flex"), "cpu")
