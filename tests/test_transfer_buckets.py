"""Cutting weights into buckets of bytes and joining them again; digests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.engine import WeightSpec
from core.errors import ManymeshError
from manymesh.workers.transfer.buckets import (
    ALIGN,
    Joiner,
    NamedTensor,
    as_bytes,
    fill_buckets,
    offsets,
    plan,
    whole_tensors,
)
from manymesh.workers.transfer.digest import digest

DTYPES = ("bfloat16", "float32", "float64", "int64", "bool", "uint8", "float8_e4m3fn", "float16")


def spec_of(name: str, tensor: torch.Tensor, together: str | None = None) -> WeightSpec:
    return WeightSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), together)


def filled(shape: tuple[int, ...], dtype: str, seed: int = 0) -> torch.Tensor:
    kind = getattr(torch, dtype)
    random = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * kind.itemsize
    data = torch.randint(0, 2 if kind is torch.bool else 256, (size,), dtype=torch.uint8, generator=random)
    return data.view(kind).view(shape)


@st.composite
def models(draw: st.DrawFn) -> tuple[list[WeightSpec], list[NamedTensor]]:
    """Tensors of all dtypes and layouts in memory; some load together, with others between them."""
    stream, specs = [], []
    shared = torch.arange(4096, dtype=torch.float32)
    for number in range(draw(st.integers(0, 7))):
        kind = draw(st.sampled_from(["plain", "transposed", "shared", "odd"]))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        tensor = filled(shape, draw(st.sampled_from(DTYPES)), number)
        if kind == "transposed":
            tensor = tensor.permute(list(reversed(range(tensor.dim()))))
        elif kind == "shared":  # overlaps with other tensors
            tensor = shared[draw(st.integers(0, 100)) :][: draw(st.integers(0, 300))]
        elif kind == "odd":  # not aligned to words
            tensor = filled((draw(st.integers(1, 70)),), "uint8", number)[1:]
        name = f"w{number}"
        stream.append((name, tensor))
        specs.append(spec_of(name, tensor, draw(st.sampled_from([None, None, "a", "b"]))))
    return specs, stream


def carried(specs: list[WeightSpec], stream: list[NamedTensor], bucket_bytes: int) -> list[list[NamedTensor]]:
    """What a receiver is given to load, bucket by bucket. One buffer carries all buckets, as a link's would."""
    joiner, buckets, loads = Joiner(specs), plan(specs, bucket_bytes), []
    buffer = torch.empty(max(bucket_bytes, ALIGN) + ALIGN, dtype=torch.uint8)
    for bucket, pieces in zip(buckets, fill_buckets(specs, buckets, stream), strict=True):
        starts, size = offsets(bucket.sizes)
        assert size <= max(bucket_bytes // ALIGN * ALIGN, ALIGN)
        buffer.fill_(255)
        places = [buffer[at : at + len(piece)] for at, piece in zip(starts, pieces, strict=True)]
        for place, piece in zip(places, pieces, strict=True):
            place.copy_(piece)
        loads.append([(name, tensor.clone()) for name, tensor in joiner.add(bucket, places)])
    return loads


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    exact = torch.equal(as_bytes(a.contiguous()), as_bytes(b.contiguous()))
    return (a.shape, a.dtype) == (b.shape, b.dtype) and exact


@settings(max_examples=300, deadline=None)
@given(models(), st.integers(1, 400))
def test_what_is_cut_and_joined_is_what_it_was(model: Any, bucket_bytes: int) -> None:
    specs, stream = model
    loads = carried(specs, stream, bucket_bytes)
    have = [pair for load in loads for pair in load]
    assert [name for name, _ in have] == [name for name, _ in stream]
    assert all(same(a, b) for (_, a), (_, b) in zip(have, stream, strict=True))
    for together in ("a", "b"):
        names = {spec.name for spec in specs if spec.together == together}
        assert sum(any(name in names for name, _ in load) for load in loads) <= 1
    whole = list(whole_tensors(specs, stream, bucket_bytes))
    assert [name for load in whole for name, _ in load] == [name for name, _ in stream]
    assert all(tensor is stream[int(name[1:])][1] for load in whole for name, tensor in load)


@pytest.mark.parametrize(
    "size", [n * 64 + d for n in (0, 1, 2) for d in (-17, -16, -15, -1, 0, 1, 15, 16) if n or d > 0]
)
def test_tensors_of_every_size_about_a_buckets_edge_cross_whole(size: int) -> None:
    stream = [("a", filled((size,), "uint8")), ("b", filled((4,), "float32")), ("c", filled((size,), "uint8", 1))]
    specs = [spec_of(*pair) for pair in stream]
    have = [pair for load in carried(specs, stream, 64) for pair in load]
    assert all(same(a, b) for (_, a), (_, b) in zip(have, stream, strict=True))
    pieces = [piece for bucket in plan(specs, 64) for piece in bucket.pieces if piece.tensor == 0]
    assert len(pieces) == -(-size // 64), "a tensor is cut no more than it must be"


def test_biases_between_q_k_and_v_make_one_load_of_them_all() -> None:
    stream = [(f"{p}.{kind}", filled((3, 3), "float32")) for p in "qkv" for kind in ("weight", "bias")]
    stream = [("first", filled((2,), "float32")), *stream, ("last", filled((2,), "float32"))]
    together = {name: f"qkv.{name[2:]}" for name, _ in stream[1:-1]}
    specs = [spec_of(name, tensor, together.get(name)) for name, tensor in stream]
    for bucket_bytes in (16, 48, 1000):
        loads = [[name for name, _ in load] for load in carried(specs, stream, bucket_bytes)]
        assert sum("q.weight" in load for load in loads) == 1
        assert set(together) <= set(next(load for load in loads if "q.weight" in load))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda stream: stream[:-1], "fewer tensors"),
        (lambda stream: [*stream, ("more", torch.ones(1))], "another tensor"),
        (lambda stream: stream[::-1], "another tensor"),
        (lambda stream: [(name, tensor.double()) for name, tensor in stream], "float64"),
        (lambda stream: [(name, tensor[:1]) for name, tensor in stream], "another tensor"),
    ],
)
def test_a_stream_that_is_not_what_was_announced_is_an_error(change: Any, message: str) -> None:
    stream = [("a", torch.ones(5)), ("b", torch.ones(3))]
    specs = [spec_of(*pair) for pair in stream]
    with pytest.raises(ManymeshError, match=message):
        list(fill_buckets(specs, plan(specs, 16), change(stream)))


def test_loads_within_one_process_are_of_about_a_buckets_size_and_never_part_what_loads_together() -> None:
    names = ["a", "q", "k", "v", "b", "big"]
    together = {"q": "qkv", "k": "qkv", "v": "qkv"}
    specs = [WeightSpec(name, (4,), "float32", together.get(name)) for name in names]
    stream = [(name, torch.zeros(100 if name == "big" else 4)) for name in names]
    have = [[name for name, _ in bucket] for bucket in whole_tensors(specs, iter(stream), max_bytes=32)]
    assert have == [["a"], ["q", "k", "v"], ["b"], ["big"]]
    assert list(whole_tensors([], iter([]), 32)) == []


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5000), st.data())
def test_a_digest_notices_any_byte_that_changed_or_moved_to_another_row(size: int, data: st.DataObject) -> None:
    tensor = filled((size,), "uint8", size)
    other = tensor.clone()
    at = data.draw(st.integers(0, size - 1))
    other[at] += data.draw(st.integers(1, 255))
    assert digest(tensor) != digest(other)
    assert digest(tensor) == digest(tensor.clone())
    assert digest(tensor) != digest(tensor[:-1])
    if size > 2048:
        swapped = torch.cat([tensor[1024:2048], tensor[:1024], tensor[2048:]])
        assert digest(tensor) != digest(swapped)
        assert digest(tensor[1:]) == digest(tensor[1:].clone()), "alignment doesn't matter"


@pytest.mark.parametrize("dtype", DTYPES)
def test_digests_are_of_bytes_whatever_the_dtype_and_shape(dtype: str) -> None:
    tensor = filled((3, 5, 7), dtype)
    assert digest(tensor) == digest(as_bytes(tensor))
    assert digest(torch.empty(0)) == 0
    assert digest(filled((), dtype)) == digest(filled((1,), dtype))
