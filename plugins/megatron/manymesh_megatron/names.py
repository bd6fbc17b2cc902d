"""What megatron-core calls a model's parameters, and the tensors that save_pretrained writes for them.

Pure: from a name to names and a `Kind`, and from shards to the strided views of them that the saved tensors are.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from enum import StrEnum

import attrs
import torch


class Kind(StrEnum):
    """How a parameter's shards, one a tensor-parallel rank, make up its saved tensors."""

    WHOLE = "whole"  # every rank has all of it
    VOCAB = "vocab"  # rows, the last of which may be padding
    COLUMNS = "columns"
    QKV = "qkv"  # rows: for each query group its queries, its key, its value
    GATE_UP = "gate_up"  # rows: in each shard gate's, then up's
    PACKED_GATE_UP = "packed_gate_up"  # one expert of a parameter that holds a rank's; GATE_UP transposed
    PACKED_DOWN = "packed_down"  # the same; COLUMNS transposed


# The saved tensor's dim along which tensor-parallel ranks have their parts.
SHARDED_DIM: Mapping[Kind, int | None] = {
    Kind.WHOLE: None,
    Kind.VOCAB: 0,
    Kind.COLUMNS: 1,
    Kind.QKV: 0,
    Kind.GATE_UP: 0,
    Kind.PACKED_GATE_UP: 0,
    Kind.PACKED_DOWN: 1,
}
EMBEDDING = "model.embed_tokens.weight"
SCORE = ("score.weight", "score.bias")  # a value head, as *ForTokenClassification writes it


@attrs.frozen
class SavedAs:
    """The tensors that one parameter is saved as.

    Attributes:
        names: with "{expert}" for the expert's number in the whole model, where there is one.
        expert: the expert's number on its rank; None where the parameter is no expert's, or holds all of a rank's.
        order: by layer, in it by expert, then as listed below.
    """

    kind: Kind
    names: tuple[str, ...]
    expert: int | None
    order: tuple[int, int, int]

    @property
    def of_experts(self) -> bool:
        return "{expert}" in self.names[0]


_GATE_UP = ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight")
_DOWN = ("mlp.experts.{expert}.down_proj.weight",)
# A layer's parameters as megatron's own modules call them, and as TransformerEngine's fused ones do.
_LAYER: tuple[tuple[str, Kind, tuple[str, ...]], ...] = (
    (r"input_layernorm\.weight", Kind.WHOLE, ("input_layernorm.weight",)),
    (r"self_attention\.linear_qkv\.layer_norm_weight", Kind.WHOLE, ("input_layernorm.weight",)),
    (
        r"self_attention\.linear_qkv\.(weight|bias)",
        Kind.QKV,
        (r"self_attn.q_proj.\1", r"self_attn.k_proj.\1", r"self_attn.v_proj.\1"),
    ),
    (r"self_attention\.([qk])_layernorm\.weight", Kind.WHOLE, (r"self_attn.\1_norm.weight",)),
    (r"self_attention\.linear_proj\.weight", Kind.COLUMNS, ("self_attn.o_proj.weight",)),
    (r"pre_mlp_layernorm\.weight", Kind.WHOLE, ("post_attention_layernorm.weight",)),
    (r"mlp\.linear_fc1\.layer_norm_weight", Kind.WHOLE, ("post_attention_layernorm.weight",)),
    (r"mlp\.linear_fc1\.weight", Kind.GATE_UP, ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    (r"mlp\.linear_fc2\.weight", Kind.COLUMNS, ("mlp.down_proj.weight",)),
    (r"mlp\.router\.weight", Kind.WHOLE, ("mlp.gate.weight",)),
    (r"mlp\.experts\.local_experts\.(?P<expert>\d+)\.linear_fc1\.weight", Kind.GATE_UP, _GATE_UP),
    (r"mlp\.experts\.local_experts\.(?P<expert>\d+)\.linear_fc2\.weight", Kind.COLUMNS, _DOWN),
    (r"mlp\.experts\.linear_fc1\.weight(?P<expert>\d+)", Kind.GATE_UP, _GATE_UP),
    (r"mlp\.experts\.linear_fc2\.weight(?P<expert>\d+)", Kind.COLUMNS, _DOWN),
    (r"mlp\.experts\.weight1", Kind.PACKED_GATE_UP, _GATE_UP),
    (r"mlp\.experts\.weight2", Kind.PACKED_DOWN, _DOWN),
)


def saved_as(name: str, *, tied: bool = False, value_head: bool = False) -> SavedAs | None:
    """From a GPTModel's parameter, its layer numbered in the whole model, to saved tensors; None for an unknown one.

    Args:
        tied: the output layer is a copy of the embedding.
        value_head: the output layer gives one number a token.
    """
    after = sys.maxsize  # of all layers
    outer: dict[str, tuple[Kind, str, int]] = {
        "embedding.word_embeddings.weight": (Kind.VOCAB, EMBEDDING, -1),
        "decoder.final_layernorm.weight": (Kind.WHOLE, "model.norm.weight", after),
        "output_layer.weight": (Kind.VOCAB, EMBEDDING if tied else "lm_head.weight", after),
    }
    if value_head:
        outer |= {f"output_layer.{each.rpartition('.')[2]}": (Kind.WHOLE, each, after) for each in SCORE}
    if name in outer:
        kind, saved, layer = outer[name]
        return SavedAs(kind, (saved,), None, (layer, -1, list(outer).index(name)))
    if not (layer_match := re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)):
        return None
    for position, (pattern, kind, templates) in enumerate(_LAYER):
        if match := re.fullmatch(pattern, layer_match[2]):
            names = tuple(f"model.layers.{layer_match[1]}.{match.expand(template)}" for template in templates)
            number = match.groupdict().get("expert")
            expert = None if number is None else int(number)
            return SavedAs(kind, names, expert, (int(layer_match[1]), -1 if expert is None else expert, position))
    return None


def views(kind: Kind, shards: torch.Tensor, queries: int, head_dim: int) -> tuple[torch.Tensor, ...]:
    """The saved tensors in a parameter's shards, not copied, in the order of `SavedAs.names`.

    Args:
        shards: (number of shards, *a shard's shape), of WHOLE one. A lone shard gives the parts that lie in it, but for
            QKV: with more ranks than query groups a shard has a part of a group.
        queries: attention heads a query group.
        head_dim: size of an attention head.

    Returns:
        views with the elements of the saved tensor in its order; their shape has more dims (see `saved_shape`).
    """
    rows = shards.flatten(0, 1)
    match kind:
        case Kind.WHOLE:
            return (shards[0],)
        case Kind.VOCAB:
            return (rows,)
        case Kind.COLUMNS:
            return (shards.transpose(0, 1),)
        case Kind.QKV:
            groups = rows.unflatten(0, (-1, queries + 2, head_dim))
            return (groups[:, :queries], groups[:, queries], groups[:, queries + 1])
        case Kind.GATE_UP:
            pairs = shards.unflatten(1, (2, -1))
            return (pairs[:, 0], pairs[:, 1])
        case Kind.PACKED_GATE_UP:
            pairs = shards.transpose(1, 2).unflatten(1, (2, -1))
            return (pairs[:, 0], pairs[:, 1])
        case Kind.PACKED_DOWN:
            return (rows.T,)


def saved_shape(kind: Kind, view: torch.Tensor, ndim: int) -> tuple[int, ...]:
    """Of a saved tensor with `ndim` dims, from its view."""
    if ndim == 1:
        return (view.numel(),)
    rows = view.shape[0] if kind is Kind.COLUMNS else view.numel() // view.shape[-1]
    return (rows, view.numel() // rows)
