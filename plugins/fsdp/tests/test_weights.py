"""Weights cross by the names that save_pretrained writes, whatever transformers does to them in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_steps import build, infer, step, weights
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from core.errors import Refused
from sdk.reference import make_batch

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "untied": ("qwen3", {"tie_word_embeddings": False}),
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


def test_only_the_first_rank_is_given_tensors_where_asked(on, qwen3) -> None:
    def job(rank: int, world_size: int) -> list[tuple[str, int]]:
        return [(name, each.numel()) for name, each in build(qwen3).export_weights(dst="first")]

    first, second = on(2, job)
    assert [name for name, _ in first] == [name for name, _ in second]
    assert all(size > 0 for _, size in first)
    assert all(size == 0 for _, size in second)


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


def test_exported_tensors_are_the_receivers_own(on, qwen3) -> None:
    engine = build(qwen3)
    exported = weights(engine)
    copies = {name: tensor.clone() for name, tensor in exported.items()}
    step(engine, make_batch())
    assert all(torch.equal(exported[name], copies[name]) for name in copies)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda stream: {"model.nonsense": torch.ones(1)} | stream, "unexpected: ['model.nonsense']"),
        (lambda stream: dict(list(stream.items())[1:]), "1 missing: ['model.embed_tokens.weight']"),
        (lambda stream: stream | {"model.norm.weight": torch.ones(3)}, "another shape"),
    ],
    ids=["unexpected", "missing", "shape"],
)
def test_a_stream_of_other_weights_is_refused_and_the_engine_stays_usable(on, qwen3, spoil, message) -> None:
    def job(rank: int, world_size: int) -> None:
        engine = build(qwen3)
        stream = weights(engine)
        with pytest.raises(Refused) as refusal:
            engine.load_weights(iter(spoil(stream).items()))
        assert message in str(refusal.value)
        engine.load_weights(iter(stream.items()))
        assert torch.equal(weights(engine)["model.norm.weight"], stream["model.norm.weight"])

    on(2, job)


def test_a_name_that_comes_twice_is_refused(on, qwen3) -> None:
    engine = build(qwen3)
    stream = list(weights(engine).items())
    with pytest.raises(Refused, match="twice"):
        engine.load_weights(iter(stream[:1] + stream))


def test_an_adapter_alone_is_refused(on, qwen3) -> None:
    engine = build(qwen3, trainable=False)
    for call in (engine.weight_specs, engine.export_weights):
        with pytest.raises(Refused, match="adapter"):
            call(adapter="only")
    with pytest.raises(Refused, match="adapter"):
        engine.adapter_disabled()
