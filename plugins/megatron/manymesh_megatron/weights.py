"""A megatron-core model's weights by the names that save_pretrained writes, one parameter at a time in both directions.

What crosses for a parameter of S bytes (an expert's: S is one local expert's of all expert-parallel ranks together):

- export to "all": the owning stage broadcasts its shards over pp, S / tp bytes to each rank, then tp ranks gather what
  each lacks. So a rank receives every byte of the model once, a tp-th of it over pp, which is what spans machines.
  Experts the same, gathered over etp, then ep. Data-parallel replicas do this side by side and exchange nothing.
- export to "first": the owning stage's ranks send their shards to the first stage, S bytes in all, where rank 0 gathers
  them. Ranks of other replicas neither send nor receive.
- load and read_directory: nothing.

Beside its model a rank holds the gathered parameter and the one saved tensor that is cut from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import attrs
import torch
import torch.distributed as dist

from core.engine import WeightSpec
from core.errors import Refused
from core.manifest import ModelFacts
from manymesh.parts.weights import check_stream, together
from manymesh_megatron.directory import SavedDirectory
from manymesh_megatron.names import SCORE, SHARDED_DIM, Kind, SavedAs, saved_as, saved_shape, views

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig


@attrs.frozen
class Unit:
    """What one exchange carries: a parameter's shard, or one expert of a parameter that packs a rank's experts."""

    saved: SavedAs
    shape: tuple[int, ...]
    dtype: torch.dtype
    exported: bool  # not so the last stage's copy of the embedding

    @property
    def axes(self) -> Literal["none", "tp", "ep"]:
        """Along which it is gathered; "ep" is etp and ep."""
        if self.saved.of_experts:
            return "ep"
        return "none" if self.saved.kind is Kind.WHOLE else "tp"


@attrs.frozen
class LocalUnit:
    """A unit's shard on this rank. Wrappers move a parameter's memory, so the parameter is kept."""

    unit: Unit
    parameter: torch.nn.Parameter
    slot: int | None = None  # among the experts that the parameter packs

    def shard(self) -> torch.Tensor:
        tensor = self.parameter.detach()
        return tensor if self.slot is None else tensor.view(-1, *self.unit.shape)[self.slot]


@attrs.frozen
class Row:
    """A unit in the order of the export, wherever it lies."""

    stage: int  # the pipeline rank that holds it
    index: int  # among what that rank holds
    unit: Unit
    specs: tuple[tuple[WeightSpec, ...], ...]  # by expert-parallel rank


class MegatronWeights:
    """Export, load and reading of this rank's part of a model, by saved names.

    Collective over pp: stages tell each other what they hold, once.

    Args:
        chunks: this rank's GPTModels without wrappers, one for each virtual stage.
        groups: its process groups tp, pp, ep, expt_tp and tp_ep.
        value_head: the output layer gives one number a token; it is saved as `score`.

    Raises:
        Refused: on all ranks, where a parameter of any stage has no saved name.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        config: TransformerConfig,
        model: ModelFacts,
        groups: ProcessGroupCollection,
        value_head: bool = False,
    ) -> None:
        self._groups: Any = groups
        self._queries, self._head_dim = config.num_attention_heads // config.num_query_groups, config.kv_channels
        self._local_experts = (config.num_moe_experts or 0) // groups.ep.size()
        self._vocab_size = model.vocab_size
        unknown: list[str] = []
        self._local = [local for chunk in chunks for local in self._find(chunk, value_head, unknown)]
        # Whether what is gathered here reaches rank 0; the first stage's answer counts.
        reach = {
            "none": dist.get_rank() == 0,
            "tp": 0 in dist.get_process_group_ranks(groups.tp),
            "ep": 0 in dist.get_process_group_ranks(groups.tp_ep),
        }
        stages: list[Any] = [None] * groups.pp.size()
        dist.all_gather_object(stages, ([local.unit for local in self._local], reach, unknown), group=groups.pp)
        if unknown := [name for _, _, names in stages for name in names]:
            raise Refused(
                "the model has parameters that no saved name is known for",
                have=f"{len(unknown)}: {unknown[:8]}",
                want="a dense or expert model of the Llama and Qwen families",
                where=model.path,
                mend="train it with another engine",
            )
        self._reach: dict[str, bool] = stages[0][1]
        rows = [
            Row(stage, index, unit, self._describe(unit))
            for stage, (units, *_) in enumerate(stages)
            for index, unit in enumerate(units)
            if unit.exported
        ]
        self._table = sorted(rows, key=lambda row: row.unit.saved.order)
        self._specs = {spec.name: spec for row in self._table for specs in row.specs for spec in specs}
        self._places: dict[str, list[tuple[LocalUnit, int]]] = {}  # of a saved tensor, on this rank
        for local in self._local:
            for part, name in enumerate(self._names(local.unit, groups.ep.rank())):
                self._places.setdefault(name, []).append((local, part))

    def specs(self) -> list[WeightSpec]:
        """The same on every rank, in the order of the export."""
        return list(self._specs.values())

    @torch.no_grad()
    def export(self, dst: Literal["all", "first"]) -> Iterator[tuple[str, torch.Tensor]]:
        """Collective. A tensor is the receiver's own and contiguous; on ranks that dst leaves out it is empty."""
        for row in self._table:
            yield from self._split(row, *self._gather(row, dst))

    @torch.no_grad()
    def load(self, stream: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy full tensors, the same stream on every rank, into this rank's shards. Not collective.

        Raises:
            Refused: an unknown name, one that came before, a wrong shape, or (at the end) names that never came. What
                came before is loaded then: a stream cannot be checked in advance.
        """
        for name, tensor in check_stream(stream, {name: spec.shape for name, spec in self._specs.items()}):
            self._fill(name, tensor)

    @torch.no_grad()
    def read_directory(self, path: str) -> None:
        """Read this rank's part from the *.safetensors of a Hugging Face directory. Not collective.

        Every rank checks all names and shapes before it changes anything, so that all refuse alike. It then reads the
        slices that it owns and nothing else. A value head stays as it is where the directory has none.

        Raises:
            Refused: a file is absent or unreadable, names are missing or have another shape, or the directory holds
                weights of the decoder that the model has no place for.
        """
        with SavedDirectory(path) as saved:
            for name in saved.check(self._specs, optional=SCORE):
                if name in self._places:
                    self._fill(name, saved.tensor(name))

    def _find(self, chunk: Any, value_head: bool, unknown: list[str]) -> Iterator[LocalUnit]:
        tied = bool(chunk.share_embeddings_and_output_weights) and not value_head
        for name, parameter in chunk.named_parameters():
            # Layers are counted from the chunk's first in a name, from the model's first in layer_number, from 1.
            global_name = re.sub(
                r"^decoder\.layers\.(\d+)",
                lambda match: f"decoder.layers.{chunk.decoder.layers[int(match[1])].layer_number - 1}",
                name,
            )
            saved = saved_as(global_name, tied=tied, value_head=value_head)
            is_exported = not (tied and name == "output_layer.weight")
            shape, dtype = tuple(parameter.shape), parameter.dtype
            if saved is None:
                unknown.append(global_name)
            elif saved.of_experts and saved.expert is None:
                for slot in range(self._local_experts):
                    one = attrs.evolve(saved, expert=slot, order=(saved.order[0], slot, saved.order[2]))
                    yield LocalUnit(Unit(one, self._packed(saved.kind, shape), dtype, is_exported), parameter, slot)
            else:
                yield LocalUnit(Unit(saved, shape, dtype, is_exported), parameter)

    def _packed(self, kind: Kind, shape: tuple[int, ...]) -> tuple[int, ...]:
        """One expert's shape in a parameter that GroupedMLP views as (experts, rows, columns)."""
        rows, columns = shape
        if kind is Kind.PACKED_DOWN:
            return (rows // self._local_experts, columns)
        return (rows, columns // self._local_experts)

    def _names(self, unit: Unit, ep_rank: int) -> tuple[str, ...]:
        if unit.saved.expert is None:
            return unit.saved.names
        expert = ep_rank * self._local_experts + unit.saved.expert
        return tuple(name.format(expert=expert) for name in unit.saved.names)

    def _views(self, unit: Unit, shards: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return views(unit.saved.kind, shards, self._queries, self._head_dim)

    def _sizes(self, unit: Unit) -> tuple[int, int]:
        """Expert-parallel ranks that a unit is gathered from, and shards of each."""
        if unit.axes == "ep":
            return self._groups.ep.size(), self._groups.expt_tp.size()
        return 1, self._groups.tp.size() if unit.axes == "tp" else 1

    def _describe(self, unit: Unit) -> tuple[tuple[WeightSpec, ...], ...]:
        ep_size, num_shards = self._sizes(unit)
        dtype = str(unit.dtype).removeprefix("torch.")
        shapes = []
        for shell in self._views(unit, torch.empty(num_shards, *unit.shape, device="meta")):
            shape = saved_shape(unit.saved.kind, shell, len(unit.shape))
            if unit.saved.kind is Kind.VOCAB and self._vocab_size is not None:
                shape = (min(shape[0], self._vocab_size), shape[1])
            shapes.append(shape)
        return tuple(
            tuple(
                WeightSpec(name, shape, dtype, together(name))
                for name, shape in zip(self._names(unit, ep_rank), shapes, strict=True)
            )
            for ep_rank in range(ep_size)
        )

    def _gather(self, row: Row, dst: Literal["all", "first"]) -> tuple[torch.Tensor | None, bool]:
        """Collective: a unit's shards where they are wanted, and whether their memory is new.

        Returns:
            shards: (expert-parallel ranks, shards of each, *a shard's shape).
        """
        pp, stage, unit = self._groups.pp, row.stage, row.unit
        if dst == "first" and not self._reach[unit.axes]:
            return None, False
        is_new = stage != pp.rank()
        shards: torch.Tensor | None
        shards = self._empty(unit, unit.shape) if is_new else self._local[row.index].shard()
        if dst == "all" and pp.size() > 1:
            dist.broadcast(shards, group=pp, group_src=stage)
        elif dst == "first" and stage > 0 and pp.rank() == stage:
            dist.send(shards, group=pp, group_dst=0)
        elif dst == "first" and stage > 0 and pp.rank() == 0:
            dist.recv(shards, group=pp, group_src=stage)
        if dst == "first" and pp.rank() > 0:
            return None, False
        along = {"none": (), "tp": (self._groups.tp,), "ep": (self._groups.expt_tp, self._groups.ep)}[unit.axes]
        for group in (each for each in along if each.size() > 1):
            shards, is_new = _gather_along(group, shards, dst), True
            if shards is None:
                return None, False
        return shards.view(*self._sizes(unit), *unit.shape), is_new

    def _split(self, row: Row, shards: torch.Tensor | None, is_new: bool) -> Iterator[tuple[str, torch.Tensor]]:
        if shards is None:
            yield from ((spec.name, self._empty(row.unit, (0,))) for specs in row.specs for spec in specs)
            return
        for specs, of_rank in zip(row.specs, shards, strict=True):
            for spec, view in zip(specs, self._views(row.unit, of_rank), strict=True):
                if row.unit.saved.kind is Kind.VOCAB:
                    view = view[: spec.shape[0]]
                # A new buffer that is this tensor and no more is given away. All else is copied once.
                if not (is_new and view.is_contiguous() and view.numel() == shards.numel()):
                    view = view.clone(memory_format=torch.contiguous_format)
                yield spec.name, view.view(spec.shape)

    def _empty(self, unit: Unit, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=unit.dtype, device=self._local[0].parameter.device)

    def _fill(self, name: str, source: Any) -> None:
        """Take this rank's part of a saved tensor: a tensor, or a file's, of which no more is read."""
        for local, part in self._places.get(name, ()):
            unit, shard = local.unit, local.shard()
            kind, ndim = unit.saved.kind, len(unit.shape)
            group = self._groups.expt_tp if unit.axes == "ep" else self._groups.tp
            if kind is Kind.QKV:
                # Where the saved rows go in all shards together ascends, so a shard's are consecutive.
                total = torch.arange(group.size() * unit.shape[0])
                places = self._views(unit, total[None])[part].flatten() - group.rank() * unit.shape[0]
                first, stop = torch.searchsorted(places, torch.tensor([0, unit.shape[0]])).tolist()
                rows = source[(slice(first, stop), *[slice(None)] * (ndim - 1))]
                shard.index_copy_(0, places[first:stop].to(shard.device), rows.to(shard))
                continue
            view = self._views(unit, shard[None])[part]
            index = [slice(None)] * ndim
            if (dim := SHARDED_DIM[kind]) is not None:
                size = saved_shape(kind, view, ndim)[dim]
                index[dim] = slice(group.rank() * size, (group.rank() + 1) * size)
            mine = source[tuple(index)]
            if kind is Kind.VOCAB:
                view[mine.shape[0] :].zero_()  # padding
                view = view[: mine.shape[0]]
            view.copy_(mine.reshape(view.shape))


def _gather_along(group: Any, shard: torch.Tensor, dst: Literal["all", "first"]) -> torch.Tensor | None:
    """(ranks, *shard's shape) on all ranks of the group, or on its first, which rank 0 is wherever it is one."""
    if dst == "first" and group.rank() > 0:
        dist.gather(shard, group=group, group_dst=0)
        return None
    out = shard.new_empty((group.size(), *shard.shape))
    if dst == "first":
        dist.gather(shard, list(out), group=group, group_dst=0)
    else:
        dist.all_gather_into_tensor(out.view(-1, *shard.shape[1:]), shard, group=group)
    return out
