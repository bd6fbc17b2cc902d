"""Weights that cross by name: what a rollout loads in one go, and a stream that must be of the model that it is for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from core.errors import Refused

FUSED_BY_ROLLOUTS = (
    (re.compile(r"\.(?:q|k|v)_proj\."), ".qkv_proj."),
    (re.compile(r"\.(?:gate|up)_proj\."), ".gate_up_proj."),
)


def together(name: str) -> str | None:
    """For WeightSpec.together, of a name that save_pretrained writes: the one that a rollout's fused tensor has."""
    for pattern, fused in FUSED_BY_ROLLOUTS:
        if pattern.search(name):
            return pattern.sub(fused, name)
    return None


def checked(
    stream: Iterable[tuple[str, torch.Tensor]], shapes: Mapping[str, Sequence[int]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The stream, each tensor once it is known to be one of `shapes` (by name). Not collective.

    Raises:
        Refused: an unknown name, one that came before, or a wrong shape, in the place of the tensor; names that never
            came, at the end. What came before is loaded then: a stream cannot be checked in advance.
    """
    seen: set[str] = set()
    for name, tensor in stream:
        if name not in shapes or name in seen:
            raise _refused(shapes, seen, name)
        if tuple(tensor.shape) != tuple(shapes[name]):
            raise Refused(
                f"the weight {name!r} has another shape than the model's",
                have=tuple(tensor.shape),
                want=tuple(shapes[name]),
                mend="send the weights of the model that the engine was built from",
            )
        seen.add(name)
        yield name, tensor
    if len(seen) < len(shapes):
        raise _refused(shapes, seen)


def _refused(known: Mapping[str, object], seen: set[str], unexpected: str | None = None) -> Refused:
    missing = [name for name in known if name not in seen]
    what = "a weight came twice" if unexpected in seen else "a weight has a name that the model doesn't know"
    return Refused(
        what if unexpected else "weights are missing, and the model is loaded in part",
        have=f"{len(seen)} matched, {len(missing)} missing: {missing[:8]}, "
        f"unexpected: {[unexpected] if unexpected else []}",
        want=f"each of the {len(known)} names of weight_specs once",
        mend="send every tensor of weight_specs by its name",
    )
