"""Layers for megatron-core where TransformerEngine is not there: what its own local ones lack for sp and cp."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional as F


class RMSNorm(torch.nn.Module):
    """RMSNorm that says that its gradient is a part of the sum, where each tp rank sees some of the tokens."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010
        self._eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., hidden_size), normalised in fp32 as transformers does."""
        in_fp32 = hidden.float()
        scaled = in_fp32 * torch.rsqrt(in_fp32.square().mean(-1, keepdim=True) + self._eps)
        return self.weight * scaled.to(hidden.dtype)


class Attention(MegatronModule):
    """Causal core attention by torch's scaled_dot_product_attention.

    With context parallel each rank has the queries of two chunks of a row, the r-th from the front and the r-th from
    the back of 2 x cp (as megatron cuts them, so that the causal work is equal), and gathers keys and values of all.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self._scale, self._cp = softmax_scale, pg_collection.cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """query (tokens, rows, heads, dim); key and value with fewer heads under grouped queries. Packed without rows.

        Returns:
            (tokens, rows, heads * dim); packed (tokens, heads * dim).
        """
        if packed_seq_params is not None:
            return self._packed(query, key, value, packed_seq_params.cu_seqlens_q.tolist())
        size = self._cp.size()
        mask = None
        if size > 1:
            # Each rank's gradient of the gathered keys and values is a part of it: backward sums them.
            both = gather_from_sequence_parallel_region(
                torch.stack((key, value)).transpose(0, 1), tensor_parallel_output_grad=True, group=self._cp
            )
            chunks = both.chunk(2 * size)
            key, value = torch.cat([chunks[i] for i in from_zigzag(size)]).unbind(1)
            tokens = torch.arange(key.shape[0], device=key.device)
            mine = torch.cat([tokens.chunk(2 * size)[i] for i in zigzag(self._cp.rank(), size)])
            mask = mine[:, None] >= tokens
        q, k, v = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        values = self._attend(q, k, v, mask)
        return values.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)

    def _packed(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, borders: list[int]) -> torch.Tensor:
        """(all tokens, heads, dim), row by row: a mask of all tokens by all tokens would cost more."""
        sizes = [end - start for start, end in pairwise(borders)]
        rows = []
        for row in zip(*(each.split(sizes) for each in (query, key, value)), strict=True):
            q, k, v = (each.transpose(0, 1)[None] for each in row)
            rows.append(self._attend(q, k, v, None)[0].transpose(0, 1))
        return torch.cat(rows).flatten(1)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """(rows, heads, tokens, dim); causal where there is no mask."""
        if mask is not None and q.shape[1] != k.shape[1]:
            # With a mask and fewer key-value heads CUDA has only a kernel that holds tokens x tokens in fp32.
            k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self._scale, enable_gqa=q.shape[1] != k.shape[1]
        )


def zigzag(rank: int, size: int) -> tuple[int, int]:
    """Which of the 2 x size chunks of a row a context-parallel rank has."""
    return rank, 2 * size - 1 - rank


def from_zigzag(size: int) -> list[int]:
    """Where the chunks 0, 1, 2, ... stand when the ranks' chunks are put one after another."""
    order = [piece for rank in range(size) for piece in zigzag(rank, size)]
    return [order.index(piece) for piece in range(2 * size)]


class ValueHead(torch.nn.Module):
    """One number a token, in place of a GPTModel's output layer; the same on every tp rank.

    Named and shaped as the head of transformers' *ForTokenClassification with one label.
    """

    def __init__(self, config: TransformerConfig, tp: Any) -> None:
        super().__init__()
        self._tp, self.sequence_parallel = tp, config.sequence_parallel
        options: dict[str, Any] = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, **options))
        self.bias = torch.nn.Parameter(torch.zeros(1, **options))

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        """(tokens, rows, hidden_size) to (tokens, rows, 1), in the form of a column-parallel layer's answer."""
        if self.sequence_parallel:
            # All tp ranks go on alike from here, so a rank's gradient of what is gathered is whole.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=self._tp)
        return F.linear(hidden, self.weight, self.bias), None


def read_without_gradient(embedding: torch.nn.Module, token: int, tp: Any) -> None:
    """Where a token is read, its embedding gets no gradient: what transformers' models do for config.pad_token_id.

    A zero row, as padding's is in a new model, would have a gradient a thousand times that of the others.
    """

    def hook(_: torch.nn.Module, args: Any, kwargs: Any, vectors: torch.Tensor) -> torch.Tensor:
        # (tokens, rows), as the vectors are (tokens, rows, hidden_size). Stages send what lies in this order only.
        ids = kwargs["input_ids"].t().contiguous()
        if len(vectors) < len(ids):  # sequence parallel: this rank's tokens
            ids = ids.chunk(tp.size())[tp.rank()]
        return torch.where((ids == token)[..., None], vectors.detach(), vectors)

    embedding.register_forward_hook(hook, with_kwargs=True)


def local_block_spec(config: TransformerConfig, vp_stage: int | None) -> Any:
    """megatron's spec of a stage's layers without TransformerEngine, with the layers above in it."""
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    block.layer_norm = RMSNorm
    for layer in block.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        attention = parts.self_attention.submodules
        attention.core_attention = Attention
        for name in ("q_layernorm", "k_layernorm"):
            if getattr(attention, name, None) not in (None, IdentityOp):
                setattr(attention, name, RMSNorm)
    return block
