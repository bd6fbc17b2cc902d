"""A sharded model's weights by the names that save_pretrained writes, one tensor at a time in both directions.

transformers fuses some weights in memory (experts into one parameter) and splits them again when saving. A `Unit` is
the smallest set of parameters that such a conversion treats together: nearly always one parameter with its own name.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Literal, cast

import attrs
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from core.engine import WeightSpec
from manymesh.parts.engine_checkpoint import persistent
from manymesh.parts.weights import check_stream, together
from manymesh_fsdp.model import copy_full


@attrs.frozen
class Unit:
    """Parameters by their names in the model, and the tensors that they are saved as."""

    parameters: tuple[str, ...]
    saved: dict[str, torch.Size]

    @property
    def plain(self) -> bool:
        """Saved as it is in memory, under its own name."""
        return tuple(self.saved) == self.parameters


class FsdpWeights:
    """Export and load of a sharded model's weights by saved names."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._conversions = [
            each
            for each in get_model_conversion_mapping(model, add_legacy=False)
            if not isinstance(each, PrefixChange)  # as revert_weight_conversion does for models made from a config
        ]
        self.units = self._find_units()

    def _find_units(self) -> list[Unit]:
        reverse = [each.reverse_transform() for each in reversed(self._conversions)]
        converters = [each for each in reverse if isinstance(each, WeightConverter)]
        members: dict[str, list[str]] = {}
        tensors = persistent(self._model)
        for name in tensors:
            members.setdefault(rename_source_key(name, [], converters)[0], []).append(name)
        units = []
        for names in members.values():
            shells = {name: torch.empty(tensors[name].shape, device="meta") for name in names}
            saved = revert_weight_conversion(self._model, shells)
            units.append(Unit(tuple(names), {name: shell.shape for name, shell in saved.items()}))
        return units

    def specs(self) -> list[WeightSpec]:
        tensors = persistent(self._model)
        dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
        return [
            WeightSpec(name, tuple(shape), dtypes[unit.parameters[0]], together(name))
            for unit in self.units
            for name, shape in unit.saved.items()
        ]

    @torch.no_grad()
    def export(self, device: torch.device, dst: Literal["all", "first"]) -> Iterator[tuple[str, torch.Tensor]]:
        """Collective. A tensor is the receiver's own: later training doesn't change it."""
        tensors = persistent(self._model)
        leave_out = dst == "first" and dist.get_rank() > 0
        for unit in self.units:
            full = {name: _full(tensors[name], device) for name in unit.parameters}
            if leave_out:
                dtype = tensors[unit.parameters[0]].dtype
                full = {name: torch.empty(0, dtype=dtype, device=device) for name in unit.saved}
            elif not unit.plain:
                full = revert_weight_conversion(self._model, full)
            for name in unit.saved:
                yield name, full.pop(name)

    def load(self, stream: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Copy full tensors, the same stream on every rank, into the shards. Not collective.

        Raises:
            Refused: as manymesh.parts.weights.checked.
        """
        tensors = persistent(self._model)
        owner = {name: unit for unit in self.units for name in unit.saved}
        waiting: dict[int, dict[str, torch.Tensor]] = {}
        shapes = {name: unit.saved[name] for name, unit in owner.items()}
        for name, tensor in check_stream(stream, shapes):
            unit = owner[name]
            if unit.plain:
                copy_full(tensors[name], tensor)
                continue
            parts = waiting.setdefault(id(unit), {})
            parts[name] = tensor.clone()  # the stream may use its buffer again before the unit is whole
            if len(parts) == len(unit.saved):
                for parameter, full in self._convert(waiting.pop(id(unit))).items():
                    copy_full(tensors[parameter], full)

    def _convert(self, tensors_as_saved: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Saved tensors of one unit to parameters, by the steps that from_pretrained takes."""
        renamings = [each for each in self._conversions if isinstance(each, WeightRenaming)]
        converters = [each for each in self._conversions if isinstance(each, WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        out: dict[str, torch.Tensor] = {}
        active: dict[str, Any] = {}
        for name in sorted(tensors_as_saved, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters)
            if pattern is None:
                out[target] = tensors_as_saved[name]
                continue
            if target not in active:
                active[target] = copy.deepcopy(by_pattern[pattern])
            active[target].add_tensor(target, name, pattern, tensors_as_saved[name])
        for target, converter in active.items():
            parameters = converter.convert(target, model=self._model, config=self._model.config)
            out |= {name: value[0] if isinstance(value, list) else value for name, value in parameters.items()}
        return out


def _full(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor.detach().to(device, copy=True)
    full: torch.Tensor = cast(DTensor, tensor.detach().to(device)).full_tensor()
    # On one rank the full tensor is the shard itself.
    return full.clone() if tensor.device_mesh.size() == 1 else full
