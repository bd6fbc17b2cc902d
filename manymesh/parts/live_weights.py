"""Loading a stream of named tensors into a live model, by the names that save_pretrained writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.overrides import TorchFunctionMode

from core.engine import WeightSpec
from core.errors import Refused
from manymesh.parts.saved_form import saved_form
from manymesh.parts.weight_names import some
from manymesh.parts.weights import Announced, check_stream, together


class _KeepViews(TorchFunctionMode):
    """transformers makes the parts of a fused parameter contiguous when it saves; we want them as views."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.contiguous:
            return args[0]
        return func(*args, **(kwargs or {}))


@attrs.frozen
class _Slot:
    """A saved tensor's place: a strided view of one of the model's tensors."""

    owner: str
    view: torch.Tensor  # on meta: shape, stride, offset and dtype


class WeightTable:
    """Where each tensor that save_pretrained would write lies in a model's own memory.

    The map is found once, by running transformers' save-time conversion (fused experts to one name an expert, and the
    like) on meta tensors and following the views it gives. It holds names and strides only, so it stays valid while
    the weights are dropped.
    """

    def __init__(self, model: Any) -> None:
        self._live: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
        with _KeepViews():
            shapes, parts = saved_form(model)
        owners = {id(tensor): name for name, tensor in shapes.items()}
        self._slots: dict[str, _Slot] = {}
        coverage: Counter[str] = Counter()
        self._computed: list[str] = []  # not views, so nothing can be written through them
        for name, part in parts.items():
            owner = owners.get(id(part if part._base is None else part._base))
            if owner is None:
                self._computed.append(name)
            else:
                self._slots[name] = _Slot(owner, part)
                coverage[owner] += part.numel()
        self._computed += [name for name in shapes if coverage[name] != shapes[name].numel()]

    def announced(self, specs: Sequence[WeightSpec]) -> Announced:
        """What is to come of these specs, which must be what save_pretrained would write; nothing is changed.

        Raises:
            Refused: as manymesh.parts.weights.check_specs, or this model's weights cannot be written in place.
        """
        self._check()
        return Announced(specs, {name: slot.view for name, slot in self._slots.items()})

    def specs(self) -> list[WeightSpec]:
        """What save_pretrained would write of this model.

        Raises:
            Refused: its weights are not views of its parameters.
        """
        self._check()
        views = {name: slot.view for name, slot in self._slots.items()}
        return [
            WeightSpec(name, tuple(view.shape), str(view.dtype).removeprefix("torch."), together(name))
            for name, view in views.items()
        ]

    def export(self, *, empty: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Copies of all weights, in the order of specs; tensors without elements where nobody wants them."""
        for spec in self.specs():
            tensor = self.target(spec.name)
            yield spec.name, tensor.new_empty(0) if empty else tensor.clone()

    def load(self, stream: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Copy a stream of all weights into the model.

        Raises:
            Refused: as manymesh.parts.weights.checked.
        """
        with torch.no_grad():
            for name, tensor in check_stream(stream, {spec.name: spec.shape for spec in self.specs()}):
                self.target(name).copy_(tensor)

    def copy(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Copy tensors into the model, which may be reused after return."""
        with torch.no_grad():
            for name, tensor in bucket:
                self.target(name).copy_(tensor)

    def _check(self) -> None:
        if self._computed:
            raise Refused(
                "this model's checkpoint is computed from its parameters, so it cannot be loaded tensor by tensor",
                have=some(self._computed),
                want="names that are views of parameters",
                mend="use another backend for this model",
            )

    def target(self, name: str) -> torch.Tensor:
        """The memory of a saved tensor in the model, to be written to."""
        slot = self._slots[name]
        view = slot.view
        return self._live[slot.owner].detach().as_strided(view.shape, view.stride(), view.storage_offset())


def drop(model: torch.nn.Module) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Free the memory of all parameters, tied ones once. Returns what `restore` needs; buffers stay."""
    shells = [(parameter, torch.empty_like(parameter, device="meta")) for parameter in model.parameters()]
    for parameter, _ in shells:
        parameter.data = parameter.data.new_empty(0)
    return shells


def restore(shells: Iterable[tuple[torch.nn.Parameter, torch.Tensor]]) -> None:
    """Give dropped parameters memory of the old shape. What it holds is garbage until every weight was loaded."""
    for parameter, shape in shells:
        parameter.data = torch.empty_like(shape, device=parameter.device)
