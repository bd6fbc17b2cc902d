"""Checkpoints go on exactly, whatever the sizes they are loaded at."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron_steps import checkpoint_tensors, engine_of, step, weights
from named_models import SIZES, Tensors, differing

from manymesh.parts.checkpoint_directory import MANIFEST
from sdk.reference import OPTIMIZER, make_batch, movement_error

BATCHES = [make_batch(seed=seed) for seed in range(4)]
DECAYING = attrs.evolve(OPTIMIZER, schedule="linear", total_steps=5)
SP2 = {"tensor_parallel": 2, "sequence_parallel": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    **SIZES,
    "dp4, not distributed": {"distributed_optimizer": False},
    "dp4, overlapped": {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 5000},
    "pp4": {"pipeline_parallel": 4},
    "cp2": {"context_parallel": 2},
    "tp2 sp": SP2,
    "tp2 sp ep2 etp1": {**SP2, "expert_parallel": 2, "expert_tensor_parallel": 1},
    "tp2, 70 rows": {"tensor_parallel": 2, "vocab_multiple": 35},  # of a vocabulary of 64
    "tp4, 96 rows": {"tensor_parallel": 4, "vocab_multiple": 24},
}


def save_and_go_on(rank: int, world_size: int, model: str, path: str, **options: Any) -> dict[str, Tensors]:
    """Two steps, a checkpoint, two more: weights at the start, at the checkpoint, and at the end."""
    with engine_of(model, optimizer=DECAYING, **options) as engine:
        start = weights(engine)
        for batch in BATCHES[:2]:
            step(engine, batch, 2)
        engine.save_checkpoint(path, step=2)
        saved = weights(engine)
        for batch in BATCHES[2:]:
            step(engine, batch, 2)
        return {"start": start, "saved": saved, "end": weights(engine)}


def load_and_go_on(rank: int, world_size: int, model: str, path: str, again: str, **options: Any) -> dict[str, Tensors]:
    with engine_of(model, optimizer=DECAYING, **options) as engine:
        step(engine, BATCHES[3], 2)  # state of another run, to be replaced
        assert engine.load_checkpoint(path) == 2
        loaded = weights(engine)
        engine.save_checkpoint(again, step=2)
        for batch in BATCHES[2:]:
            step(engine, batch, 2)
        return {"loaded": loaded, "end": weights(engine)}


@pytest.fixture(scope="session")
def saved(on, model_dir, tmp_path_factory) -> Callable[..., tuple[str, str, dict[str, Tensors]]]:
    """`saved(family, layout)`: model, checkpoint after two steps, and the weights of the unbroken run; made once."""
    runs: dict[str, tuple[str, str, dict[str, Tensors]]] = {}

    def make(family: str, layout: str, model_options: Mapping[str, Any], **options: Any) -> Any:
        key = repr((family, layout, sorted(model_options.items()), sorted(options.items())))
        if key not in runs:
            model, path = model_dir(family, **model_options), str(tmp_path_factory.mktemp("saved") / "step-2")
            runs[key] = (model, path, on(4, save_and_go_on, model, path, **LAYOUTS[layout], **options)[0])
        return runs[key]

    return make


@pytest.fixture(scope="session")
def qwen3(model_dir: Callable[..., str]) -> str:
    return model_dir("qwen3", num_layers=2)


TIED, VALUE = {"tie_word_embeddings": True}, {"value_model": True}
BASE = [("qwen3", TIED, "tp2 pp2", "dp4", {})]
MORE = [
    ("qwen3_moe", {}, "ep2", "tp2 sp", {}),
    ("qwen3", {}, "tp2, 70 rows", "tp4, 96 rows", {}),
    ("qwen3", VALUE, "pp2", "tp2", {"model_type": "value_model"}),
]
ALL = [
    ("qwen3", TIED, "pp2 vpp2", "tp2", {"dtype": "bfloat16"}),
    ("qwen2", {}, "dp4", "tp2 pp2", {}),
    ("qwen3", TIED, "tp2 pp2", "pp2 vpp2", {}),
    *[("qwen3", TIED, "tp2 pp2", layout, {}) for layout in ("dp4, not distributed", "dp4, overlapped", "tp4", "cp2")],
    *[("qwen3", {}, "tp2", layout, {}) for layout in ("pp2", "pp4", "dp4, overlapped", "pp2 vpp2")],
    *[("qwen3", {}, "dp4, not distributed", layout, {"dtype": "bfloat16"}) for layout in ("tp2 pp2", "dp4")],
    *[("qwen3", {}, "dp4, overlapped", layout, {"dtype": "bfloat16"}) for layout in ("tp2", "dp4, not distributed")],
    *[("qwen3", {}, "tp2, 70 rows", layout, {}) for layout in ("dp4", "pp2")],
    *[("llama", {}, "pp2 vpp2", layout, {}) for layout in ("dp4", "tp4", "pp4")],
    *[("qwen3_moe", {}, "tp2 sp ep2 etp1", layout, {}) for layout in ("dp4", "ep2", "tp2 sp", "pp2 ep2")],
    *[("qwen3_moe", {}, "pp2 ep2", layout, {"dtype": "bfloat16"}) for layout in ("dp4, not distributed", "tp2 sp")],
]


def cases(of: list[Any], *marks: Any) -> list[Any]:
    return [pytest.param(*each, marks=marks, id=f"{each[0]} {each[2]} to {each[3]} {[*each[4]]}") for each in of]


@pytest.mark.parametrize(
    ("family", "model_options", "before", "after", "options"),
    [*cases(BASE), *cases(MORE, pytest.mark.ci), *cases(ALL, pytest.mark.slow)],
)
def test_training_goes_on_as_if_unbroken_at_other_sizes(
    on, saved, tmp_path, family, model_options, before, after, options
) -> None:
    model, path, unbroken = saved(family, before, model_options, **options)
    again = on(4, load_and_go_on, model, path, str(tmp_path / "again"), **LAYOUTS[after], **options)[0]
    assert differing(again["loaded"], unbroken["saved"]) == []
    # All of the optimizer's state is there too, to the bit: moments, fp32 copies, and the count of steps.
    assert differing(checkpoint_tensors(tmp_path / "again"), checkpoint_tensors(path)) == []
    # Sums over other ranks are rounded otherwise: as much as without a checkpoint.
    limit = 3e-2 if options.get("dtype") == "bfloat16" else 1e-6
    assert movement_error(again["end"], unbroken["end"], unbroken["start"]) < limit


@pytest.mark.parametrize("layout", ["tp2 pp2", pytest.param("dp4", marks=pytest.mark.slow)])
def test_training_goes_on_to_the_bit_at_the_same_sizes(on, saved, tmp_path, layout) -> None:
    model, path, unbroken = saved("qwen3", layout, TIED)
    again = on(4, load_and_go_on, model, path, str(tmp_path / "again"), **LAYOUTS[layout])[0]
    assert differing(again["end"], unbroken["end"]) == []


def test_all_ranks_write_about_as_much(saved) -> None:
    """dp replicas share out what they all hold, and each writes its own of what they don't."""
    _, path, _ = saved("qwen2", "dp4", {})
    sizes = [file.stat().st_size for file in Path(path).glob("*.distcp")]
    assert len(sizes) == 4
    assert max(sizes) < 1.2 * min(sizes)


def test_megatron_reads_it_with_its_own_dist_checkpointing(on, saved) -> None:
    from megatron.core import dist_checkpointing

    model, path, unbroken = saved("qwen3", "tp2 pp2", TIED)

    def job(rank: int, world_size: int) -> Tensors:
        with engine_of(model, tensor_parallel=2, trainable=False) as engine:
            (stage,) = engine._ready().models
            with engine._runtime.scope():
                metadata = dist_checkpointing.load_content_metadata(path)
                state = {"model": stage.sharded_state_dict(metadata=metadata)}
                stage.load_state_dict(dist_checkpointing.load(state, path, strict="log_unexpected")["model"])
            return weights(engine)

    assert differing(on(4, job)[0], unbroken["saved"]) == []


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4), ends=st.tuples(st.integers(0, 700), st.integers(0, 700))
)
def test_boxes_hold_a_range_of_elements_in_order(shape: list[int], ends: tuple[int, int]) -> None:
    from manymesh_megatron.tensor_shards import boxes

    first, stop = sorted(min(end, prod(shape)) for end in ends)
    numbers = torch.arange(prod(shape)).view(shape)
    parts = list(boxes(shape, first, stop))
    slices = [
        numbers[tuple(slice(at, at + size) for at, size in zip(offset, sizes, strict=True))] for offset, sizes in parts
    ]
    assert [int(each) for box in slices for each in box.flatten()] == list(range(first, stop))
    assert len(parts) < 2 * len(shape)


@pytest.mark.parametrize(
    ("layout", "after"), [pytest.param("pp2 vpp2", "float32", marks=pytest.mark.ci), ("tp2 pp2", "bfloat16")]
)
def test_an_engine_of_another_dtype_reads_the_fp32_parameters(on, saved, tmp_path, layout, after) -> None:
    model, path, _ = saved("qwen3", layout, TIED, **({"dtype": "bfloat16"} if after == "float32" else {}))

    def job(rank: int, world_size: int) -> None:
        with engine_of(model, dtype=after) as engine:
            engine.load_checkpoint(path)
            engine.save_checkpoint(str(tmp_path / "again"), step=2)

    on(4, job)
    have, want = checkpoint_tensors(tmp_path / "again"), checkpoint_tensors(path)
    master = "optimizer.state.fp32_param."
    names = [name for name in want if not name.startswith("optimizer.")]
    assert "embedding.word_embeddings.weight" in names
    for name in names:
        in_fp32 = want.get(master + name, want[name])
        assert torch.equal(have.get(master + name, have[name]), in_fp32), name
        assert torch.equal(have[name], in_fp32.to(getattr(torch, after))), name


def test_padding_of_the_vocabulary_is_zero_after_a_load(on, saved) -> None:
    from manymesh_megatron.tensor_shards import rank_tensors

    model, path, _ = saved("qwen3", "tp2 pp2", TIED)

    def job(rank: int, world_size: int) -> int:
        with engine_of(model, **LAYOUTS["tp4, 96 rows"]) as engine:
            state = engine._ready()
            with engine._runtime.scope():
                padding = rank_tensors(state.models, state.optimizer, 64).padding
            for each in padding:
                each.fill_(1.0)
            engine.load_checkpoint(path)
            assert not any(each.any() for each in padding)
            return sum(each.numel() for each in padding)

    # Rows of 64 numbers in the parameter and two moments: 24 a rank, of which the first 64 are no padding.
    assert on(4, job) == [0, 0, 8 * 64 * 3, 24 * 64 * 3]


def test_random_generators_go_on_at_the_same_sizes_and_are_left_alone_at_others(on, qwen3, tmp_path) -> None:
    path = str(tmp_path / "a")

    def job(rank: int, world_size: int) -> list[float]:
        torch.manual_seed(rank)
        with engine_of(qwen3, tensor_parallel=2) as engine:
            engine.save_checkpoint(path, step=0)
            numbers = [torch.rand(1).item()]
            torch.rand(7)
            engine.load_checkpoint(path)
            numbers.append(torch.rand(1).item())
        with engine_of(qwen3, pipeline_parallel=2) as engine:
            torch.manual_seed(10 + rank)
            engine.load_checkpoint(path)
            numbers.append(torch.rand(1).item())
            torch.manual_seed(10 + rank)
        return [*numbers, torch.rand(1).item()]

    for first, again, rest, alone in on(2, job):
        assert first == again
        assert rest == alone


def test_an_offloaded_engine_is_loaded_for_the_time(on, qwen3, tmp_path) -> None:
    offload = {"offload_parameters": True, "offload_optimizer": True, "dtype": "bfloat16", "tensor_parallel": 2}

    def job(rank: int, world_size: int) -> None:
        paths = [str(tmp_path / name) for name in ("stays", "away")]
        with engine_of(qwen3, dtype="bfloat16", tensor_parallel=2) as engine:
            step(engine, BATCHES[0], 2)
            engine.save_checkpoint(paths[0], step=1)
            step(engine, BATCHES[1], 2)
            want = weights(engine)
        with engine_of(qwen3, **offload) as engine:
            step(engine, BATCHES[0], 2)
            engine.save_checkpoint(paths[1], step=1)
            assert differing(checkpoint_tensors(paths[1]), checkpoint_tensors(paths[0])) == []
            step(engine, BATCHES[3], 2)
            engine.load_checkpoint(paths[0])
            assert engine._away == {"model", "optimizer", "grad"}
            step(engine, BATCHES[1], 2)
            assert differing(weights(engine), want) == []

    on(2, job)


def test_the_manifest_says_what_the_checkpoint_is_whatever_its_sizes(saved) -> None:
    paths = [saved("qwen3", "tp2 pp2", TIED)[1], saved("qwen3", "pp2 vpp2", TIED, dtype="bfloat16")[1]]
    manifests = [json.loads((Path(path) / MANIFEST).read_text()) for path in paths]
    for each in manifests:
        each.pop("files")
    assert manifests[0] == manifests[1]
    parameters = manifests[0].pop("parameters")
    assert parameters["model.embed_tokens.weight"] == [64, 64]
    assert parameters["model.layers.3.self_attn.k_proj.weight"] == [32, 64]
    assert manifests[0] == {
        "format": 1,
        "engine": "megatron",
        "step": 2,
        "schedule_step": 2,
        "model_type": "qwen3",
        "world_size": 4,
        "optimizer": True,
    }
