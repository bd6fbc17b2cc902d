"""Weights cross by the names that save_pretrained writes, whatever transformers does to them in memory, in families
beside the conformance kit's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_steps import build, infer, step, weights
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from sdk.reference import make_batch

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "experts": ("qwen3_moe", {"tie_word_embeddings": False}),
    "renamed experts": ("mixtral", {"num_local_experts": 4}),
    "persistent buffer": (
        "glm4_moe",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
    ),
}


@pytest.fixture(params=FAMILIES)
def directory(request: pytest.FixtureRequest, model_dir: Any) -> str:
    family, options = FAMILIES[request.param]
    return str(model_dir(family, **options))


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_exported_is_what_is_saved(on, directory, world_size) -> None:
    def job(rank: int, world_size: int) -> tuple[dict[str, torch.Tensor], list[Any]]:
        engine = build(directory, trainable=False)
        return weights(engine), list(engine.weight_specs())

    want = load_file(Path(directory, "model.safetensors"))
    for exported, specs in on(world_size, job):
        assert exported.keys() == want.keys()
        assert list(exported) == [spec.name for spec in specs]
        for spec in specs:
            assert torch.equal(exported[spec.name], want[spec.name])
            assert (spec.shape, spec.dtype) == (tuple(want[spec.name].shape), "float32")


def test_specs_group_what_rollouts_fuse(on, model_dir) -> None:
    groups: dict[str, list[str]] = {}
    engine = build(model_dir("qwen3_moe", tie_word_embeddings=False), trainable=False)
    for spec in engine.weight_specs():
        if spec.together:
            groups.setdefault(spec.together, []).append(spec.name.split(".")[-2])
    assert groups.pop("model.layers.0.self_attn.qkv_proj.weight") == ["q_proj", "k_proj", "v_proj"]
    assert groups.pop("model.layers.1.mlp.experts.3.gate_up_proj.weight") == ["gate_proj", "up_proj"]
    assert {len(names) for names in groups.values()} == {2, 3}


@pytest.mark.parametrize("world_size", [1, 2])
def test_trained_weights_load_into_a_fresh_engine(on, directory, world_size) -> None:
    def job(rank: int, world_size: int) -> None:
        trained, fresh, batch = build(directory), build(directory, trainable=False), make_batch()
        step(trained, batch)
        before = infer(fresh, batch)
        if world_size > 1:  # no full parameter outlives a pass
            assert all(isinstance(p, DTensor) for p in fresh._ready().model.parameters())

        def one_buffer() -> Iterator[tuple[str, torch.Tensor]]:
            buffer = torch.empty(100_000)
            for name, tensor in trained.export_weights():
                view = buffer[: tensor.numel()].view(tensor.shape)
                yield name, view.copy_(tensor)

        fresh.load_weights(one_buffer())
        after, want = infer(fresh, batch), infer(trained, batch)
        assert torch.equal(after["log_probs"], want["log_probs"])
        assert (after["log_probs"] - before["log_probs"]).abs().max() > 1e-2

    on(world_size, job)
