"""A stream of weights is of the model that it is for, or refused by name."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from core.errors import Refused
from sdk.parts.weights import checked, together

SHAPES = {"a": (2, 3), "b": (4,)}
A, B = ("a", torch.zeros(2, 3)), ("b", torch.zeros(4))


def test_a_whole_stream_passes_as_it_is_in_any_order() -> None:
    assert [(name, id(tensor)) for name, tensor in checked(iter([B, A]), SHAPES)] == [("b", id(B[1])), ("a", id(A[1]))]


@pytest.mark.parametrize(
    ("stream", "passed", "message"),
    [
        ([A], 1, r"missing, and the model is loaded in part(.|\n)*1 missing: \['b'\]"),
        ([A, ("c", B[1]), B], 1, r"1 matched, 1 missing: \['b'\], unexpected: \['c'\]"),
        ([A, A, B], 1, "came twice"),
        ([A, ("b", torch.zeros(5))], 1, r"'b' has another shape(.|\n)*\(5,\)(.|\n)*\(4,\)"),
        ([("a", torch.zeros(3, 2)), B], 0, "another shape"),
    ],
)
def test_what_is_wrong_is_refused_in_its_place(
    stream: Iterable[tuple[str, torch.Tensor]], passed: int, message: str
) -> None:
    seen: list[str] = []
    with pytest.raises(Refused, match=message):
        seen.extend(name for name, _ in checked(stream, SHAPES))
    assert seen == ["a"] * passed


def test_what_rollouts_fuse_goes_together() -> None:
    layer = "model.layers.0."
    assert {together(f"{layer}self_attn.{each}_proj.bias") for each in "qkv"} == {f"{layer}self_attn.qkv_proj.bias"}
    assert together(f"{layer}mlp.experts.3.up_proj.weight") == f"{layer}mlp.experts.3.gate_up_proj.weight"
    for alone in ("self_attn.o_proj.weight", "mlp.down_proj.weight", "self_attn.q_norm.weight", "mlp.gate.weight"):
        assert together(layer + alone) is None
