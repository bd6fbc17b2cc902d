"""Loading a stream of named tensors into a live model, by the names that save_pretrained writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.overrides import TorchFunctionMode
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from core.errors import Refused
from core.protocols import WeightSpec


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
        saved = model.state_dict()
        for name in model._keys_to_ignore_on_save or ():
            saved.pop(name, None)
        saved = remove_tied_weights_from_state_dict(saved, model)
        shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in saved.items()}
        owners = {id(tensor): name for name, tensor in shapes.items()}
        with _KeepViews():
            parts = revert_weight_conversion(model, dict(shapes))
        self._slots: dict[str, _Slot] = {}
        covered: Counter[str] = Counter()
        self._computed: list[str] = []  # not views, so nothing can be written through them
        for name, part in parts.items():
            owner = owners.get(id(part if part._base is None else part._base))
            if owner is None:
                self._computed.append(name)
            else:
                self._slots[name] = _Slot(owner, part)
                covered[owner] += part.numel()
        self._computed += [name for name in shapes if covered[name] != shapes[name].numel()]

    def check(self, specs: Sequence[WeightSpec]) -> None:
        """Compare the specs with what save_pretrained would write; nothing is changed.

        Raises:
            Refused: names are missing, unexpected or doubled, shapes or kinds of dtype differ, or this model's weights
                cannot be written in place.
        """
        if self._computed:
            raise Refused(
                "this model's checkpoint is computed from its parameters, so it cannot be loaded tensor by tensor",
                have=_some(self._computed),
                want="names that are views of parameters",
                mend="use another rollout for this model",
            )
        counts = Counter(spec.name for spec in specs)
        doubled = [name for name, count in counts.items() if count > 1]
        missing = [name for name in self._slots if name not in counts]
        unexpected = [name for name in counts if name not in self._slots]
        if doubled or missing or unexpected:
            matched = len(counts) - len(unexpected)
            raise Refused(
                f"the weights offered are not this model's: {matched} matched, {len(missing)} missing, "
                f"{len(unexpected)} unexpected, {len(doubled)} doubled",
                have=f"missing {_some(missing)}; unexpected {_some(unexpected)}; doubled {_some(doubled)}",
                want=f"the {len(self._slots)} names that save_pretrained writes, each once",
                mend="give trainer and rollout the same model directory; tied weights are sent once",
            )
        wrong = [text for spec in specs if (text := self._difference(spec))]
        if wrong:
            raise Refused(
                f"{len(wrong)} of {len(specs)} weights offered have another shape or kind of dtype",
                have=_some(wrong),
                mend="give trainer and rollout the same model directory",
            )

    def _difference(self, spec: WeightSpec) -> str:
        view = self._slots[spec.name].view
        dtype = getattr(torch, spec.dtype, None)
        if tuple(spec.shape) != tuple(view.shape):
            return f"{spec.name} is {tuple(spec.shape)}, not {tuple(view.shape)}"
        if not isinstance(dtype, torch.dtype) or dtype.is_floating_point != view.dtype.is_floating_point:
            return f"{spec.name} is {spec.dtype}, not {str(view.dtype).removeprefix('torch.')}"
        return ""

    def target(self, name: str) -> torch.Tensor:
        """The memory of a saved tensor in the model, to be written to."""
        slot = self._slots[name]
        view = slot.view
        return self._live[slot.owner].detach().as_strided(view.shape, view.stride(), view.storage_offset())


class WeightUpdate:
    """One pass of all weights into the model's own memory, in buckets of any order."""

    def __init__(self, table: WeightTable, specs: Sequence[WeightSpec], version: int) -> None:
        table.check(specs)
        self.version = version
        self._table = table
        self._left = {spec.name: spec for spec in specs}

    def load(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Copy the bucket's tensors in.

        Raises:
            Refused: a tensor was not announced, came before, or is not as announced. None of the bucket is copied then.
        """
        names = [name for name, _ in bucket]
        strangers = [name for name, count in Counter(names).items() if count > 1 or name not in self._left]
        wrong = strangers or [
            f"{name} is {tuple(tensor.shape)} {tensor.dtype}, announced as {self._left[name].shape}"
            for name, tensor in bucket
            if tuple(tensor.shape) != tuple(self._left[name].shape)
            or tensor.is_floating_point() != self._table.target(name).is_floating_point()
        ]
        if wrong:
            raise Refused(
                "a bucket holds tensors that were not announced, came before, or have another shape",
                have=_some(wrong),
                mend="begin a new update and send all weights again",
            )
        with torch.no_grad():
            for name, tensor in bucket:
                self._table.target(name).copy_(tensor)
                del self._left[name]

    def check_complete(self) -> None:
        """Raises Refused with the names that have not come."""
        if self._left:
            raise Refused(
                f"{len(self._left)} of the weights announced have not come",
                have=f"missing {_some(self._left)}",
                mend="load the rest and finish again, or begin a new update",
            )


def drop(model: torch.nn.Module) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Free the memory of all parameters, tied ones once. Returns what `restore` needs; buffers stay."""
    kept = [(parameter, torch.empty_like(parameter, device="meta")) for parameter in model.parameters()]
    for parameter, _ in kept:
        parameter.data = parameter.data.new_empty(0)
    return kept


def restore(kept: Iterable[tuple[torch.nn.Parameter, torch.Tensor]]) -> None:
    """Give dropped parameters memory of the old shape. What it holds is garbage until every weight was loaded."""
    for parameter, shape in kept:
        parameter.data = torch.empty_like(shape, device=parameter.device)


def _some(names: Iterable[str], limit: int = 20) -> str:
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return f"[{', '.join(listed[:limit])}]{more}"
