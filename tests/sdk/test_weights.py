"""A stream of weights is of the model that it is for, or refused by name."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from core.engine import WeightSpec
from core.errors import Refused
from manymesh.parts.weights import Announced, check_specs, check_stream, together

SHAPES = {"a": (2, 3), "b": (4,)}
A, B = ("a", torch.zeros(2, 3)), ("b", torch.zeros(4))


def test_a_whole_stream_passes_as_it_is_in_any_order() -> None:
    assert [(name, id(tensor)) for name, tensor in check_stream(iter([B, A]), SHAPES)] == [
        ("b", id(B[1])),
        ("a", id(A[1])),
    ]


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
    names: list[str] = []
    with pytest.raises(Refused, match=message):
        names.extend(name for name, _ in check_stream(stream, SHAPES))
    assert names == ["a"] * passed


def test_what_rollouts_fuse_goes_together() -> None:
    layer = "model.layers.0."
    assert {together(f"{layer}self_attn.{each}_proj.bias") for each in "qkv"} == {f"{layer}self_attn.qkv_proj.bias"}
    assert together(f"{layer}mlp.experts.3.up_proj.weight") == f"{layer}mlp.experts.3.gate_up_proj.weight"
    for alone in ("self_attn.o_proj.weight", "mlp.down_proj.weight", "self_attn.q_norm.weight", "mlp.gate.weight"):
        assert together(layer + alone) is None


def test_a_bucket_holds_what_was_announced_and_is_missing_each_once() -> None:
    specs = [WeightSpec("a", (2, 3), "bfloat16"), WeightSpec("b", (4,), "float32")]
    update = Announced(specs, dict([A, B]))
    for bad in ([A, A], [("c", B[1])], [("a", torch.zeros(3))], [("a", torch.zeros(2, 3, dtype=torch.int64))]):
        with pytest.raises(Refused, match="bucket"):
            update.check(bad, {"a", "b"})
    update.check([B, A], {"a", "b"})
    with pytest.raises(Refused, match=r"came before[\s\S]*\[b\]"):
        update.check([B], {"a"})


def test_specs_of_another_model_are_refused_with_what_matched() -> None:
    with pytest.raises(Refused, match=r"1 matched, 1 missing, 1 unexpected, 1 doubled[\s\S]*\[b\][\s\S]*\[c\]"):
        check_specs([WeightSpec(name, (2, 3), "float32") for name in "aac"], dict([A, B]))
    with pytest.raises(Refused, match=r"2 of 2[\s\S]*a is \(9,\), not \(2, 3\), b is int64, not float32"):
        check_specs([WeightSpec("a", (9,), "float32"), WeightSpec("b", (4,), "int64")], dict([A, B]))
