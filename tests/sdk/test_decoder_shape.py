"""How many parameters a config.json comes to: against transformers' own models, and what public models' cards say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from core.errors import Refused
from core.model_facts import ModelFacts
from manymesh.parts.decoder_shape import FAMILIES, DecoderShape
from tests.support.public_models import CONFIGS, PARAMETERS

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts": 5, "num_experts_per_tok": 2}


@pytest.mark.parametrize("name", PARAMETERS)
def test_public_models_have_the_parameters_that_their_cards_say(name: str) -> None:
    config = CONFIGS[name]
    assert DecoderShape.of(ModelFacts("x", config["model_type"], config)).num_parameters == PARAMETERS[name]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("mistral", {"head_dim": 16}),
        ("mixtral", {"num_local_experts": 3}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 16, "attention_bias": True}),
        ("qwen3_moe", {"head_dim": 16, **EXPERTS}),
        ("qwen3_moe", {"head_dim": 16, **EXPERTS, "decoder_sparse_step": 2, "mlp_only_layers": [1]}),
    ],
)
def test_the_sizes_are_those_of_transformers_own_model(family: str, options: dict[str, Any]) -> None:
    config = AutoConfig.for_model(family, **(SMALL | options))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = DecoderShape.of(ModelFacts("x", family, config.to_dict()))
    assert shape.num_parameters == sum(each.numel() for each in model.parameters())
    layers = [sum(each.numel() for each in layer.parameters()) for layer in model.model.layers]
    assert [layer.total for layer in shape.layers] == layers
    assert shape.largest_tensor == max(each.numel() for each in model.parameters())


def test_every_family_is_held_to_transformers() -> None:
    (marks,) = test_the_sizes_are_those_of_transformers_own_model.pytestmark
    assert {family for family, _ in marks.args[1]} == FAMILIES


def test_a_model_that_is_not_known_or_does_not_say_its_sizes_is_refused() -> None:
    with pytest.raises(Refused, match="gpt2"):
        DecoderShape.of(ModelFacts("x", "gpt2", {}))
    with pytest.raises(Refused, match="hidden_size"):
        DecoderShape.of(ModelFacts("x", "llama", {"num_attention_heads": 2}))
