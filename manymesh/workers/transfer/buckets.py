"""Cutting a model's tensors into buckets of bytes, and joining them again.

Sender and receivers make the same plan from the same specs, so that nothing but bytes need travel. A bucket is a list
of pieces, each some consecutive bytes of one tensor. Sizes and offsets are in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

import attrs
import torch

from core.engine import WeightSpec
from core.errors import ManymeshError

ALIGN = 16  # of pieces, for torch's views and for copies in whole words

NamedTensor = tuple[str, torch.Tensor]


@attrs.frozen
class Piece:
    tensor: int  # its number in the specs
    start: int  # in the tensor
    size: int


@attrs.frozen
class BucketPlan:
    """What one bucket holds.

    Attributes:
        pieces: in the order of the specs.
        whole: units that have come entirely once this bucket has.
    """

    pieces: tuple[Piece, ...]
    whole: tuple[range, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(piece.size for piece in self.pieces)


def aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where pieces start when they lie in one buffer, and how large it is."""
    starts = list(accumulate((aligned(size) for size in sizes), initial=0))
    return starts[:-1], starts[-1]


def num_bytes(spec: WeightSpec) -> int:
    return torch.Size(spec.shape).numel() * dtype_of(spec).itemsize


def dtype_of(spec: WeightSpec) -> torch.dtype:
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ManymeshError("a weight has a dtype that torch doesn't know", have=f"{spec.name}: {spec.dtype}")
    return dtype


def units(specs: Sequence[WeightSpec]) -> list[range]:
    """Numbers of the specs that one load must bring, in order.

    A unit goes from the first tensor of a `together` to its last. Where two of them overlap (q, k and v with their
    biases between them), they are one.
    """
    last = {spec.together: number for number, spec in enumerate(specs) if spec.together is not None}
    ranges, start, end = [], 0, 0
    for number, spec in enumerate(specs):
        end = max(end, number if spec.together is None else last[spec.together])
        if number == end:
            ranges.append(range(start, number + 1))
            start = end = number + 1
    return ranges


def plan(specs: Sequence[WeightSpec], bucket_bytes: int) -> list[BucketPlan]:
    """Buckets of at most bucket_bytes, in the order of the specs.

    A unit that has no room in the last bucket starts the next one, and one that is larger than a bucket is split over
    several. Tensors without elements have no piece.
    """
    capacity = max(bucket_bytes // ALIGN, 1) * ALIGN
    sizes = [num_bytes(spec) for spec in specs]
    plans: list[BucketPlan] = []
    pieces: list[Piece] = []
    whole: list[range] = []
    offset = 0

    def close() -> None:
        nonlocal offset
        plans.append(BucketPlan(tuple(pieces), tuple(whole)))
        pieces.clear()
        whole.clear()
        offset = 0

    for unit in units(specs):
        size = sum(aligned(sizes[number]) for number in unit)
        if offset and offset + size > capacity >= size:
            close()
        for number in unit:
            start = 0
            while start < sizes[number]:
                if offset == capacity:
                    close()
                piece = Piece(number, start, min(sizes[number] - start, capacity - offset))
                pieces.append(piece)
                offset, start = offset + aligned(piece.size), start + piece.size
        whole.append(unit)
    if pieces or whole:
        close()
    return plans


def fill_buckets(
    specs: Sequence[WeightSpec],
    buckets: Iterable[BucketPlan],
    stream: Iterable[NamedTensor],
    on_tensor: Callable[[torch.Tensor], None] = lambda tensor: None,
) -> Iterator[list[torch.Tensor]]:
    """For each bucket its pieces, as flat uint8 views of the stream's tensors (of copies where one isn't contiguous).

    Args:
        stream: the tensors of the specs, in their order. It is read to its end.
        on_tensor: called with each tensor, contiguous.

    Raises:
        ManymeshError: the stream isn't what the specs say.
    """
    tensors = enumerate(_as_announced(specs, stream))
    number, data = -1, torch.empty(0, dtype=torch.uint8)
    for bucket in buckets:
        pieces = []
        for piece in bucket.pieces:
            while number < piece.tensor:
                number, tensor = next(tensors)
                tensor = tensor.contiguous()
                on_tensor(tensor)
                data = as_bytes(tensor)
            pieces.append(data[piece.start : piece.start + piece.size])
        if bucket.whole:
            while number < bucket.whole[-1][-1]:  # tensors without elements
                number, tensor = next(tensors)
                on_tensor(tensor)
        yield pieces
    for _ in tensors:
        pass


def _as_announced(specs: Sequence[WeightSpec], stream: Iterable[NamedTensor]) -> Iterator[torch.Tensor]:
    count = 0
    for count, (name, tensor) in enumerate(stream, 1):
        want = specs[count - 1] if count <= len(specs) else None
        dtype = str(tensor.dtype).removeprefix("torch.")
        if want is None or (name, tuple(tensor.shape), dtype) != (want.name, tuple(want.shape), want.dtype):
            raise ManymeshError(
                "the trainer's engine exports another tensor than it announced",
                have=f"{name} {tuple(tensor.shape)} {dtype}, the {count}. of the stream",
                want=f"{want.name} {tuple(want.shape)} {want.dtype}" if want else f"{len(specs)} tensors",
                mend="export_weights must give the tensors of weight_specs in their order",
            )
        yield tensor.detach()
    if count < len(specs):
        raise ManymeshError("the trainer's engine exports fewer tensors than it announced", have=count, want=len(specs))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as flat uint8."""
    return tensor.reshape(-1).view(torch.uint8)


class Joiner:
    """Tensors out of buckets that come in order.

    A tensor that lies in one bucket, with all that loads together with it, is a view of what came; others are put
    together in memory of their own.

    Args:
        device: for that memory, and for tensors without elements.
    """

    def __init__(self, specs: Sequence[WeightSpec], device: torch.device | str = "cpu") -> None:
        self._specs, self._device = specs, device
        self._parts: dict[int, torch.Tensor] = {}

    def add(self, bucket: BucketPlan, pieces: Sequence[torch.Tensor]) -> list[NamedTensor]:
        """The tensors that are whole now and may load together; views are good as long as the pieces are."""
        numbers = {number for unit in bucket.whole for number in unit}
        for piece, data in zip(bucket.pieces, pieces, strict=True):
            size = num_bytes(self._specs[piece.tensor])
            if piece.size == size and piece.tensor in numbers:
                self._parts[piece.tensor] = data
                continue
            if piece.tensor not in self._parts:
                self._parts[piece.tensor] = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._parts[piece.tensor][piece.start : piece.start + piece.size].copy_(data)
        return [(self._specs[number].name, self._tensor(number)) for unit in bucket.whole for number in unit]

    def _tensor(self, number: int) -> torch.Tensor:
        spec = self._specs[number]
        dtype = dtype_of(spec)
        data = self._parts.pop(number, None)
        if data is None:
            return torch.empty(spec.shape, dtype=dtype, device=self._device)
        if data.storage_offset() % dtype.itemsize or data.data_ptr() % dtype.itemsize:
            data = data.clone()
        return data.view(dtype).view(spec.shape)


def whole_tensors(
    specs: Sequence[WeightSpec], stream: Iterable[NamedTensor], max_bytes: int
) -> Iterator[list[NamedTensor]]:
    """Within one process nothing is cut: loads of about max_bytes, each of one or several units."""
    tensors = iter(stream)
    load: list[NamedTensor] = []
    size = 0
    for unit in units(specs):
        part = [next(tensors) for _ in unit]
        part_size = sum(tensor.nbytes for _, tensor in part)
        if load and size + part_size > max_bytes:
            yield load
            load, size = [], 0
        load += part
        size += part_size
    if load:
        yield load
    for _ in tensors:  # a generator does what it does last
        pass
