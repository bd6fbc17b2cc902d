"""Weights that cross by name: what a rollout loads in one go, and streams that must be of the receiver's model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

import torch

from core.engine import WeightSpec
from core.errors import Refused
from manymesh.parts.weight_names import some

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


def check_stream(
    stream: Iterable[tuple[str, torch.Tensor]], shapes: Mapping[str, Sequence[int]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The stream, each tensor once it is known to be one of `shapes` (by name). Not collective.

    Raises:
        Refused: an unknown name, one that came before, or a wrong shape, in the place of the tensor; names that never
            came, at the end. What came before is loaded then: a stream cannot be checked in advance.
    """
    names: set[str] = set()
    for name, tensor in stream:
        if name not in shapes or name in names:
            raise _refusal(shapes, names, name)
        if tuple(tensor.shape) != tuple(shapes[name]):
            raise Refused(
                f"the weight {name!r} has another shape than the model's",
                have=tuple(tensor.shape),
                want=tuple(shapes[name]),
                mend="send the weights of the model that the engine was built from",
            )
        names.add(name)
        yield name, tensor
    if len(names) < len(shapes):
        raise _refusal(shapes, names)


def _refusal(shapes: Mapping[str, object], names: set[str], unexpected: str | None = None) -> Refused:
    missing = [name for name in shapes if name not in names]
    what = "a weight came twice" if unexpected in names else "a weight has a name that the model doesn't know"
    return Refused(
        what if unexpected else "weights are missing, and the model is loaded in part",
        have=f"{len(names)} matched, {len(missing)} missing: {missing[:8]}, "
        f"unexpected: {[unexpected] if unexpected else []}",
        want=f"each of the {len(shapes)} names of weight_specs once",
        mend="send every tensor of weight_specs by its name",
    )


def check_specs(specs: Sequence[WeightSpec], expected: Mapping[str, torch.Tensor]) -> None:
    """Compare what a sender offers with a model's tensors as save_pretrained writes them.

    Dtypes of one kind (floating point or not) are alike: the receiver casts.

    Raises:
        Refused: names are missing, unexpected or doubled; shapes or kinds of dtype differ.
    """
    counts = Counter(spec.name for spec in specs)
    doubled = [name for name, count in counts.items() if count > 1]
    missing = [name for name in expected if name not in counts]
    unexpected = [name for name in counts if name not in expected]
    if doubled or missing or unexpected:
        matched = len(counts) - len(unexpected)
        raise Refused(
            f"the weights offered are not this model's: {matched} matched, {len(missing)} missing, "
            f"{len(unexpected)} unexpected, {len(doubled)} doubled",
            have=f"missing {some(missing)}; unexpected {some(unexpected)}; doubled {some(doubled)}",
            want=f"the {len(expected)} names that save_pretrained writes, each once",
            mend="give trainer and rollout the same model directory; tied weights are sent once",
        )
    wrong = [text for spec in specs if (text := _difference(spec, expected[spec.name]))]
    if wrong:
        raise Refused(
            f"{len(wrong)} of {len(specs)} weights offered have another shape or kind of dtype",
            have=some(wrong),
            mend="give trainer and rollout the same model directory",
        )


def _difference(spec: WeightSpec, expected: torch.Tensor) -> str:
    dtype = getattr(torch, spec.dtype, None)
    if tuple(spec.shape) != tuple(expected.shape):
        return f"{spec.name} is {tuple(spec.shape)}, not {tuple(expected.shape)}"
    if not isinstance(dtype, torch.dtype) or dtype.is_floating_point != expected.is_floating_point():
        return f"{spec.name} is {spec.dtype}, not {str(expected.dtype).removeprefix('torch.')}"
    return ""


class Announced:
    """The tensors that an update will bring, in buckets of any order.

    Raises:
        Refused: as check_specs.
    """

    def __init__(self, specs: Sequence[WeightSpec], expected: Mapping[str, torch.Tensor]) -> None:
        check_specs(specs, expected)
        self.specs = tuple(specs)
        self._shapes = {spec.name: tuple(spec.shape) for spec in specs}
        self._expected = expected

    def check(self, bucket: Sequence[tuple[str, torch.Tensor]], missing: Container[str]) -> None:
        """Raises Refused where a tensor was not announced, came before (is not among `missing`), or is not as
        announced."""
        counts = Counter(name for name, _ in bucket)
        strangers = [name for name, count in counts.items() if count > 1 or name not in missing]
        wrong = strangers or [
            f"{name} is {tuple(tensor.shape)} {tensor.dtype}, announced as {self._shapes[name]}"
            for name, tensor in bucket
            if tuple(tensor.shape) != self._shapes[name]
            or tensor.is_floating_point() != self._expected[name].is_floating_point()
        ]
        if wrong:
            raise Refused(
                "a bucket holds tensors that were not announced, came before, or have another shape",
                have=some(wrong),
                mend="begin a new update and send all weights again",
            )
