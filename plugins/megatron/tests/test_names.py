"""What TransformerEngine's layers and GroupedMLP call otherwise than megatron's own layers is saved as the same."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from named_models import built, differing, random_dir, saved
from torch.nn import functional as F

from core.errors import Refused


def test_a_shard_has_its_query_groups_and_its_rows_of_gate_and_up(on, model_dir) -> None:
    path = random_dir(model_dir, "qwen2")

    def job(rank: int, world_size: int) -> None:
        with built(path, "tp2") as model:
            model.weights.read_directory(path)
            want = saved(path)
        tp_rank = rank % 2
        for kind in ("weight", "bias"):
            q, k, v = (want[f"model.layers.1.self_attn.{each}_proj.{kind}"].split(16) for each in "qkv")  # by head
            group = torch.cat([*q[2 * tp_rank : 2 * tp_rank + 2], k[tp_rank], v[tp_rank]])
            assert torch.equal(model.parameters[f"0.decoder.layers.1.self_attention.linear_qkv.{kind}"], group)
        rows = [want[f"model.layers.1.mlp.{each}_proj.weight"].chunk(2)[tp_rank] for each in ("gate", "up")]
        assert torch.equal(model.parameters["0.decoder.layers.1.mlp.linear_fc1.weight"], torch.cat(rows))

    on(4, job)


FUSED = (
    (r"(layers\.\d+)\.input_layernorm\.weight", r"\1.self_attention.linear_qkv.layer_norm_weight"),
    (r"experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight", r"experts.\2.weight\1"),
)
FUSED_DENSE = (*FUSED, (r"(layers\.\d+)\.pre_mlp_layernorm\.weight", r"\1.mlp.linear_fc1.layer_norm_weight"))


def renamed(chunk: Any, rules: Sequence[tuple[str, str]]) -> Any:
    """A model with the chunk's parameters under other names; it cannot compute."""
    parameters = {}
    for name, parameter in chunk.named_parameters():
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        parameters[name] = parameter
    return made_of(parameters, chunk)


def made_of(parameters: Mapping[str, torch.nn.Parameter], chunk: Any) -> Any:
    model: Any = torch.nn.Module()
    model.share_embeddings_and_output_weights = chunk.share_embeddings_and_output_weights
    for name, parameter in parameters.items():
        *path, last = name.split(".")
        module = model
        for step in path:
            if step not in module._modules:
                module.add_module(step, torch.nn.ModuleList() if step == "layers" else torch.nn.Module())
            module = module._modules[step]
        module.register_parameter(last, parameter)
    for theirs, layer in zip(model.decoder.layers, chunk.decoder.layers, strict=True):
        theirs.layer_number = layer.layer_number
    return model


@pytest.mark.parametrize(
    ("family", "sizes", "rules"),
    [("qwen2", "tp2 pp2", FUSED_DENSE), ("qwen3_moe", "tp2 ep2 etp2", FUSED), ("qwen3_moe", "pp2 ep2", FUSED)],
)
def test_fused_layers_of_transformer_engine_are_saved_alike(on, model_dir, family, sizes, rules) -> None:
    path = random_dir(model_dir, family)

    def job(rank: int, world_size: int) -> None:
        def rebuild(chunks: list[Any]) -> list[Any]:
            return [renamed(chunk, rules) for chunk in chunks]

        with built(path, sizes, rebuild=rebuild) as model:
            assert any("linear_qkv.layer_norm_weight" in name for name in model.parameters)
            model.weights.read_directory(path)
            assert differing(dict(model.weights.export("all")), saved(path)) == []

    on(4, job)


def grouped(chunk: Any) -> Any:
    """With each layer's local experts in two parameters, shaped as megatron's GroupedMLP makes them."""
    parameters = {}
    for name, parameter in chunk.named_parameters():
        match = re.fullmatch(r"(.+\.experts)\.local_experts\.0\.linear_fc([12])\.weight", name)
        if match:
            num_experts = len(chunk.get_submodule(match[1]).local_experts)
            first, second = parameter.shape[1], parameter.shape[0] * num_experts
            shape = (first, second) if match[2] == "1" else (parameter.shape[1] * num_experts, parameter.shape[0])
            parameters[f"{match[1]}.weight{match[2]}"] = torch.nn.Parameter(torch.empty(shape))
        elif "local_experts" not in name:
            parameters[name] = parameter
    return made_of(parameters, chunk)


@pytest.mark.parametrize("sizes", ["ep2", "tp2 ep2 etp2", "pp2 ep2"])
def test_experts_packed_into_one_parameter_are_saved_one_by_one(on, model_dir, sizes) -> None:
    path = random_dir(model_dir, "qwen3_moe")

    def job(rank: int, world_size: int) -> dict[str, torch.Tensor]:
        with built(path, sizes, rebuild=lambda chunks: [grouped(chunk) for chunk in chunks]) as model:
            model.weights.read_directory(path)
            assert differing(dict(model.weights.export("all")), saved(path)) == []
            return {name: each for name, each in model.parameters.items() if "experts.weight" in name}

    packed = on(4, job)[0]
    if sizes == "ep2":
        # What GroupedMLP computes with the second of its two experts, from its own views of the parameters.
        hidden = torch.randn(5, 64)
        gate, up = (hidden @ packed["0.decoder.layers.1.mlp.experts.weight1"].view(2, 64, -1)[1]).chunk(2, dim=-1)
        have = (F.silu(gate) * up) @ packed["0.decoder.layers.1.mlp.experts.weight2"].view(2, -1, 64)[1]
        want_of = saved(path)
        gate, up, down = (
            want_of[f"model.layers.1.mlp.experts.1.{each}_proj.weight"] for each in ("gate", "up", "down")
        )
        want = (F.silu(hidden @ gate.T) * (hidden @ up.T)) @ down.T
        assert torch.allclose(have, want, rtol=1e-4, atol=1e-2)


def test_a_parameter_without_a_saved_name_is_refused_on_all_ranks(on, model_dir) -> None:
    path = random_dir(model_dir, "qwen3")

    def job(rank: int, world_size: int) -> str:
        def rebuild(chunks: list[Any]) -> list[Any]:
            rules = [(r"layers\.(\d+)\.mlp\.linear_fc2", r"layers.\1.mlp.linear_fc3")] if rank >= 2 else []
            return [renamed(chunk, rules) for chunk in chunks]

        with pytest.raises(Refused) as refusal, built(path, "pp2", rebuild=rebuild):
            pass
        return str(refusal.value)

    texts = on(4, job)
    assert "2: ['decoder.layers.2.mlp.linear_fc3.weight', 'decoder.layers.3.mlp.linear_fc3.weight']" in texts[0]
    assert len(set(texts)) == 1
