"""What this rank holds of a model and its optimizer, as boxes of whole tensors, which no layout of ranks decides.

Names and boxes of the model are those of megatron's own `sharded_state_dict`. The optimizer's state goes by the same
names, but not by the optimizers' own sharded_state_dict: for any layout, the distributed one gathers all of its
data-parallel group's state in the memory of each rank of it. A rank's share is a range of a parameter's elements, which
a few boxes hold, so each rank can write and read its own. With or without the distributed optimizer the result is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import attrs
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer

from core.errors import Refused
from manymesh_megatron.optimizer import MASTER, ScheduledOptimizer

# What megatron's sharded_state_dict is told, and must be told again by who reads it with megatron: a name a layer.
NAMING: Mapping[str, Any] = {"non_homogeneous_layers": True}


@attrs.frozen(eq=False)
class TensorShard:
    """A box of a whole tensor, and this rank's memory for it.

    Attributes:
        name: of the whole tensor.
        sources: names of whole tensors to read it from; the first that a checkpoint has.
        tensor: contiguous, of the box's shape.
        offset, whole: where the box begins in the whole tensor, and that one's shape.
        is_writer: whether this rank is the one that writes it, of all that hold it.
    """

    name: str
    sources: tuple[str, ...]
    tensor: torch.Tensor
    offset: tuple[int, ...]
    whole: tuple[int, ...]
    is_writer: bool


@attrs.frozen(eq=False)
class RankTensors:
    """All of this rank's shards, and memory that no shard holds: padding, which is zero."""

    shards: list[TensorShard]
    padding: list[torch.Tensor]


def rank_tensors(models: Sequence[Any], optimizer: ScheduledOptimizer | None, vocab_size: int | None) -> RankTensors:
    """Of this rank's GPTModels, in virtual order, and of what trains them. Not collective, and nothing is copied.

    Args:
        vocab_size: without padding; None where it is not known to be padded.

    Raises:
        Refused: a parameter's memory is not that of the boxes it is saved as.
    """
    groups: Any = ProcessGroupCollection.use_mpu_process_groups()
    writers = _Writers({"dense": groups.dp_cp.size(), "expert": groups.expt_dp.size()})
    parameters = [each for model in models for each in _parameters(model, vocab_size)]
    shares = optimizer.shares([each.parameter for each in parameters]) if optimizer is not None else {}
    tensors = RankTensors([], [])
    for placement in parameters:
        flat, share = placement.parameter.detach().view(-1), shares.get(id(placement.parameter))
        tensors.padding.append(flat[placement.stop :])
        if share is not None:
            tensors.padding.extend(each[max(0, placement.stop - share.start) :] for each in share.tensors.values())
        for place in placement.places:
            name, master = place.name, f"optimizer.state.{MASTER}.{place.name}"
            # Where an engine of another dtype wrote it, its fp32 copy is the exact one.
            sources = (master, name) if flat.dtype == torch.float32 else (name,)
            tensors.shards.extend(_shards(place, name, sources, flat, 0, writers.take(place, flat.element_size())))
            if share is None:
                continue
            is_writer = place.first if share.alone else writers.take(place, 4 * len(share.tensors))
            for kind, tensor in share.tensors.items():
                name = f"optimizer.state.{kind}.{place.name}"
                sources = (master, place.name) if kind == MASTER else (name,)
                tensors.shards.extend(_shards(place, name, sources, tensor, share.start, is_writer))
    return tensors


@attrs.frozen(eq=False)
class _Place:
    """Consecutive elements of a parameter that are a box of a whole tensor.

    Attributes:
        start: of the elements in the parameter.
        shape: of the box, as in memory.
        offset, whole: of and around the box; they may have more dims, which come first.
        replica: which copy of the box the rank has: along pp (a tied embedding's), tp, and dp.
        kind: "dense" or "expert", whose replicas lie along different ranks.
    """

    name: str
    start: int
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    whole: tuple[int, ...]
    replica: tuple[int, int, int]
    kind: str

    @property
    def first(self) -> bool:
        """Whether its dp ranks write it, and not others along pp or tp that have copies."""
        return self.replica[:2] == (0, 0)


@attrs.frozen(eq=False)
class _Placement:
    """A parameter, its places in whole tensors, and the number of its elements before padding."""

    parameter: torch.Tensor
    places: list[_Place]
    stop: int


def _parameters(model: Any, vocab_size: int | None) -> Iterator[_Placement]:
    experts = {id(each) for part in model.modules() if isinstance(part, MoELayer) for each in part.experts.parameters()}
    for base in nested_values(model.sharded_state_dict(metadata=dict(NAMING))):
        if not isinstance(base, ShardedTensor | ShardedTensorFactory):
            continue  # layers' extra state: nothing, or what TransformerEngine measured for fp8 and measures again
        parameter: Any = base.data
        stop, places = parameter.numel(), []
        for box in nested_values([base.build()]) if isinstance(base, ShardedTensorFactory) else [base]:
            start = box.data.storage_offset() - parameter.storage_offset()
            same = box.data.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
            if not same or not box.data.is_contiguous():
                raise Refused(
                    "the model's layers do not keep a parameter in memory as checkpoints do",
                    have=base.key,
                    mend="leave the choice of layers to the option layer_spec",
                )
            shape, whole = tuple(box.data.shape), tuple(box.global_shape)
            # megatron marks a value head, too, as padded like the vocabulary.
            if box.allow_shape_mismatch and vocab_size is not None and whole[0] >= vocab_size:
                rows = min(shape[0], max(0, vocab_size - box.global_offset[0]))
                shape, whole = (rows, *shape[1:]), (vocab_size, *whole[1:])
                stop = prod(shape)
            kind = "expert" if id(parameter) in experts else "dense"
            places.append(_Place(box.key, start, shape, tuple(box.global_offset), whole, box.replica_id, kind))
        yield _Placement(parameter, places, stop)


@attrs.define
class _Writers:
    """Deals what data-parallel ranks hold alike to one of them each. All of them come to the same answer unasked, since
    all see the same places in the same order."""

    sizes: Mapping[str, int]
    loads: dict[str, list[int]] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.loads = {kind: [0] * size for kind, size in self.sizes.items()}

    def take(self, place: _Place, bytes_each: int) -> bool:
        """Whether this rank writes it."""
        if not place.first:
            return False
        loads = self.loads[place.kind]
        least = loads.index(min(loads))
        loads[least] += prod(place.shape) * bytes_each
        return least == place.replica[2]


def _shards(
    place: _Place, name: str, sources: tuple[str, ...], flat: torch.Tensor, begins: int, is_writer: bool
) -> Iterator[TensorShard]:
    """What of a place lies in `flat`, which has the parameter's elements from `begins` on."""
    extra = (0,) * (len(place.whole) - len(place.shape))
    at = max(0, begins - place.start)
    stop = min(prod(place.shape), begins + flat.numel() - place.start)
    for offset, sizes in boxes(place.shape, at, stop):
        first = place.start + at - begins
        tensor = flat[first : first + prod(sizes)].view(*(1 for _ in extra), *sizes)
        offset = tuple(a + b for a, b in zip(place.offset, (*extra, *offset), strict=True))
        yield TensorShard(name, sources, tensor, offset, place.whole, is_writer)
        at += prod(sizes)


def boxes(shape: Sequence[int], first: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The boxes that hold elements first..stop of a row-major tensor, in the elements' order: offsets and sizes.

    At most 2 * dims - 1 of them.
    """
    if first >= stop:
        return
    if len(shape) == 1:
        yield (first,), (stop - first,)
        return
    row = prod(shape[1:])
    number, inside = divmod(first, row)
    if inside or stop - first < row:
        end = min(stop, (number + 1) * row)
        for offset, sizes in boxes(shape[1:], inside, end - number * row):
            yield (number, *offset), (1, *sizes)
    else:
        end = stop - stop % row
        yield (number, *(0 for _ in shape[1:])), (end // row - number, *shape[1:])
    yield from boxes(shape, end, stop)
