"""Sizes of decoders of Llama's kind, read off config.json: how many parameters, and what a token costs. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from core.errors import Refused
from core.model_facts import ModelFacts

FAMILIES = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"})
DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@attrs.frozen
class Layer:
    """Parameters of a decoder layer.

    Attributes:
        sharded: of matrices that tensor parallel ranks share.
        whole: norms, routers and biases that each of them has.
        experts: of all experts together.
        width: of the dense MLP; 0 where there are experts.
    """

    sharded: int
    whole: int
    experts: int
    width: int

    @property
    def total(self) -> int:
        return self.sharded + self.whole + self.experts


@attrs.frozen
class DecoderShape:
    """A causal language model: embedding, layers, norm, head.

    Attributes:
        tied: the head is the embedding.
        qk_norms: queries and keys are normed by head.
        num_experts, experts_per_token, expert_width: 0 of a dense model.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    qk_norms: bool
    num_experts: int
    experts_per_token: int
    expert_width: int
    layers: tuple[Layer, ...]

    @classmethod
    def of(cls, model: ModelFacts) -> DecoderShape:
        """Raises Refused: a family that isn't in FAMILIES, or a config.json that doesn't say its sizes."""
        if model.model_type not in FAMILIES:
            raise Refused(
                "the memory of this kind of model is not estimated",
                have=f"model_type {model.model_type!r}",
                want=f"one of {', '.join(sorted(FAMILIES))}",
                where=f"{model.path}/config.json",
            )
        try:
            return cls._read(model.model_type, {key: value for key, value in model.config.items() if value is not None})
        except (KeyError, TypeError, ValueError) as error:
            raise Refused(
                "config.json does not say the model's sizes",
                have=f"{type(error).__name__}: {error}",
                where=f"{model.path}/config.json",
            ) from error

    @classmethod
    def _read(cls, family: str, config: Mapping[str, Any]) -> DecoderShape:
        hidden, heads, num_layers = (
            int(config[key]) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
        )
        kv_heads = int(config.get("num_key_value_heads", heads))
        # transformers' Qwen3 has heads of 128 unless told otherwise; the others divide the hidden size.
        head_dim = int(config.get("head_dim", 128 if family.startswith("qwen3") else hidden // heads))
        experts = int(config.get("num_experts", config.get("num_local_experts", 0))) if "moe" in family else 0
        if family == "mixtral":
            experts = int(config["num_local_experts"])
        expert_width = int(config.get("moe_intermediate_size", config["intermediate_size"])) if experts else 0
        queries, keys = heads * head_dim, kv_heads * head_dim
        biased = bool(config.get("attention_bias", False)) and family != "qwen2"
        attention = hidden * (2 * queries + 2 * keys) + (queries + 2 * keys if biased or family == "qwen2" else 0)
        norms = 2 * hidden + (2 * head_dim if family.startswith("qwen3") else 0) + (hidden if biased else 0)
        step, dense = int(config.get("decoder_sparse_step", 1)), set(config.get("mlp_only_layers", ()))
        layers = []
        for number in range(num_layers):
            if experts and number not in dense and (number + 1) % step == 0:
                layers.append(Layer(attention, norms + hidden * experts, experts * 3 * hidden * expert_width, width=0))
                continue
            width = int(config["intermediate_size"])
            biases = (2 * width, hidden) if config.get("mlp_bias", False) and family == "llama" else (0, 0)
            layers.append(Layer(attention + 3 * hidden * width + biases[0], norms + biases[1], 0, width))
        return cls(
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            qk_norms=family.startswith("qwen3"),
            num_experts=experts,
            experts_per_token=int(config.get("num_experts_per_tok", 2)) if experts else 0,
            expert_width=expert_width,
            layers=tuple(layers),
        )

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of a head of its own."""
        return self.vocab * self.hidden

    @property
    def outside(self) -> int:
        """Parameters outside of the layers: embedding, head, last norm."""
        return self.embedding * (1 if self.tied else 2) + self.hidden

    @property
    def num_parameters(self) -> int:
        return self.outside + sum(layer.total for layer in self.layers)

    @property
    def largest_tensor(self) -> int:
        """Parameters of the largest one as transformers holds it, where a layer's experts are two tensors."""
        return max(self.embedding, *(max(2 * layer.experts // 3, self.hidden * layer.width) for layer in self.layers))

    def kv_cache(self, num_bytes: int, tensor_parallel: int = 1) -> int:
        """Bytes that a token's keys and values take on one of the ranks that share the heads."""
        return 2 * len(self.layers) * max(1, self.kv_heads // tensor_parallel) * self.head_dim * num_bytes

    def kept(self, layer: Layer, num_bytes: int, tensor_parallel: int = 1, *, sequence_parallel: bool = False) -> int:
        """Bytes a token that autograd keeps of a layer from its forward to its backward pass.

        As transformers writes these layers, attention by one of torch's kernels that keep no tokens x tokens: an
        RMSNorm keeps its input in fp32, what it made of it, and the product with its weight, which linear layers keep
        too; attention queries, keys, values, its output, and a number a head; the MLP what its four products read.

        Args:
            num_bytes: of a number of the computation's dtype.
            tensor_parallel: ranks that share heads and widths; what lies between is whole on each of them, or split by
                tokens with `sequence_parallel`.
        """
        ranks = tensor_parallel
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        between = 2 * self.hidden * (4 + 2 * num_bytes) // (ranks if sequence_parallel else 1)
        attention = num_bytes * (2 * queries + 2 * keys) + 4 * self.heads
        if self.qk_norms:
            attention += (4 + num_bytes) * (queries + keys)
        return between + attention // ranks + self._mlp(layer, num_bytes, 2, 4) // ranks

    def working(self, layer: Layer, num_bytes: int, tensor_parallel: int = 1) -> int:
        """Bytes a token that a layer's forward, or a step of its backward, has at once beside what is kept."""
        attention = num_bytes * 2 * (self.heads + self.kv_heads) * self.head_dim
        inner = max(attention, self._mlp(layer, num_bytes, 2, 3)) // tensor_parallel
        return num_bytes * 2 * self.hidden + max(inner, 8 * self.hidden)

    def _mlp(self, layer: Layer, num_bytes: int, hiddens: int, widths: int) -> int:
        """So many tensors of the MLP's inner width, and with experts, whose tokens are copied, of the hidden size."""
        if layer.width:
            return num_bytes * widths * layer.width
        return num_bytes * self.experts_per_token * (hiddens * self.hidden + widths * self.expert_width)


def can_shard_heads(model: ModelFacts | None, size: int) -> bool:
    """Whether a rollout's engine can shard attention over `size` devices: query heads evenly, KV heads evenly or each
    held by several. True where the model doesn't say its heads."""
    heads, kv_heads = (model.num_heads, model.num_kv_heads) if model is not None else (None, None)
    return (heads is None or heads % size == 0) and (kv_heads is None or kv_heads % size == 0 or size % kv_heads == 0)
