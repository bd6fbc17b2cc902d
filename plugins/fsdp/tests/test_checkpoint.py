"""Checkpoints go on exactly, at any world size, and a disk that is full hurts nothing."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from fsdp_steps import build, step, train, weights

from core.errors import Refused
from sdk.parts.checkpoint_directory import MANIFEST
from sdk.reference import OPTIMIZER, make_batch, movement_error

BATCHES = [make_batch(seed=seed) for seed in range(4)]
DECAYING = attrs.evolve(OPTIMIZER, schedule="linear", total_steps=5)


def save_after_two_steps(rank: int, world_size: int, model: str, path: str, batches: Any = BATCHES) -> None:
    engine = build(model, optimizer=DECAYING)
    for batch in batches[:2]:
        step(engine, batch)
    engine.save_checkpoint(path, step=2)


def go_on(rank: int, world_size: int, model: str, path: str) -> dict[str, Any]:
    engine = build(model, optimizer=DECAYING)
    step(engine, BATCHES[3])  # state of another run, to be replaced
    assert engine.load_checkpoint(path) == 2
    steps = [step(engine, batch) for batch in BATCHES[2:]]
    return {"weights": weights(engine), "steps": steps}


@pytest.mark.parametrize(("saved_at", "loaded_at"), [(2, 2), (2, 1), (1, 2)])
def test_training_goes_on_as_if_unbroken_at_any_world_size(on, qwen3, tmp_path, saved_at, loaded_at) -> None:
    (unbroken, *_) = on(1, train, qwen3, BATCHES, optimizer=DECAYING)
    path = str(tmp_path / "step-2")
    on(saved_at, save_after_two_steps, qwen3, path)
    start = weights(build(qwen3))
    for again in on(loaded_at, go_on, qwen3, path):
        assert movement_error(again["weights"], unbroken["weights"], start) < 1e-3


def test_a_checkpoint_before_the_first_step_goes_on_too(on, qwen3, tmp_path) -> None:
    """Adam's state and count of steps are there before the first step, and are those of no step."""
    engine = build(qwen3)
    engine.save_checkpoint(str(tmp_path / "start"), step=0)
    want = train(0, 1, qwen3, BATCHES[:2])
    step(engine, BATCHES[3])
    engine.load_checkpoint(str(tmp_path / "start"))
    for batch in BATCHES[:2]:
        step(engine, batch)
    have = weights(engine)
    assert all(torch.equal(have[name], want["weights"][name]) for name in have)


def test_random_generators_go_on_at_the_same_world_size(on, qwen3, tmp_path) -> None:
    def job(rank: int, world_size: int) -> list[float]:
        engine = build(qwen3)
        engine.save_checkpoint(str(tmp_path / "a"), step=0)
        first = torch.rand(1).item()
        torch.rand(7)
        engine.load_checkpoint(str(tmp_path / "a"))
        return [first, torch.rand(1).item()]

    (a, b), (c, d) = on(2, job)
    assert (a, c) == (b, d)
    assert a != c


@pytest.mark.parametrize("full_rank", [0, 1])
def test_a_full_disk_is_refused_on_all_ranks_and_the_older_checkpoint_stays(on, qwen3, tmp_path, full_rank) -> None:
    def job(rank: int, world_size: int, path: str) -> tuple[str, int, int]:
        engine = build(qwen3)
        engine.save_checkpoint(path, step=1)
        step(engine, BATCHES[0])
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == full_rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        try:
            engine.save_checkpoint(path, step=2)
            message = "saved"
        except Refused as error:
            message = str(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        left = sorted(entry.name for entry in Path(path).parent.iterdir())
        assert left == ["ckpt"]
        trained = weights(engine)
        older = engine.load_checkpoint(path)
        start = weights(build(qwen3))
        assert all(torch.equal(each, start[name]) for name, each in weights(engine).items())
        step(engine, BATCHES[0])
        assert movement_error(weights(engine), trained, start) < 1e-6
        engine.save_checkpoint(path, step=3)  # room again
        return message, older, engine.load_checkpoint(path)

    path = str(tmp_path / "ckpt")
    for message, older, newer in on(2, job, path):
        assert "File too large" in message
        assert f"rank {full_rank}" in message
        assert str(tmp_path / "ckpt.partial") in message
        assert (older, newer) == (1, 3)


def test_a_path_that_cannot_be_made_is_refused_on_all_ranks(on, qwen3, tmp_path) -> None:
    (tmp_path / "file").write_text("in the way")

    def job(rank: int, world_size: int) -> None:
        engine = build(qwen3)
        with pytest.raises(Refused, match="Not a directory"):
            engine.save_checkpoint(str(tmp_path / "file" / "ckpt"), step=1)
        step(engine, BATCHES[0])

    on(2, job)


def test_what_a_killed_run_left_does_not_hinder_a_save(on, qwen3, tmp_path) -> None:
    (tmp_path / "a.partial").mkdir()
    (tmp_path / "a.partial" / "rest").write_text("half")
    engine = build(qwen3)
    engine.save_checkpoint(str(tmp_path / "a"), step=5)
    assert engine.load_checkpoint(str(tmp_path / "a")) == 5
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]
    assert not (tmp_path / "a" / "rest").exists()


def test_a_checkpoint_of_another_model_is_refused_with_nothing_changed(on, qwen3, model_dir, tmp_path) -> None:
    other = model_dir("qwen3", tie_word_embeddings=True, num_layers=3)
    path = str(tmp_path / "other")

    def job(rank: int, world_size: int) -> str:
        build(other).save_checkpoint(path, step=1)
        engine = build(qwen3)
        step(engine, BATCHES[0])
        before = weights(engine)
        with pytest.raises(Refused) as refusal:
            engine.load_checkpoint(path)
        assert all(torch.equal(each, before[name]) for name, each in weights(engine).items())
        step(engine, BATCHES[1])
        return str(refusal.value)

    for message in on(2, job):
        assert "another model" in message
        assert "model.layers.2.self_attn.q_proj.weight" in message


def test_a_damaged_checkpoint_is_refused_before_anything_is_read(on, qwen3, tmp_path) -> None:
    engine = build(qwen3)
    step(engine, BATCHES[0])
    engine.save_checkpoint(str(tmp_path / "a"), step=1)
    before = weights(engine)
    file = next((tmp_path / "a").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(Refused, match="damaged"):
        engine.load_checkpoint(str(tmp_path / "a"))
    (tmp_path / "a" / MANIFEST).write_text("{")
    with pytest.raises(Refused, match=MANIFEST):
        engine.load_checkpoint(str(tmp_path / "a"))
    with pytest.raises(Refused, match="no checkpoint"):
        engine.load_checkpoint(str(tmp_path / "b"))
    assert all(torch.equal(each, before[name]) for name, each in weights(engine).items())


def test_a_reference_loads_the_policys_checkpoint_but_not_the_other_way_round(on, qwen3, tmp_path) -> None:
    policy, reference = build(qwen3), build(qwen3, trainable=False)
    step(policy, BATCHES[0])
    policy.save_checkpoint(str(tmp_path / "policy"), step=1)
    assert reference.load_checkpoint(str(tmp_path / "policy")) == 1
    want = weights(policy)
    assert all(torch.equal(each, want[name]) for name, each in weights(reference).items())
    reference.save_checkpoint(str(tmp_path / "reference"), step=1)
    with pytest.raises(Refused, match="no optimizer state"):
        policy.load_checkpoint(str(tmp_path / "reference"))


def test_the_manifest_says_what_the_checkpoint_is(on, qwen3, tmp_path) -> None:
    build(qwen3).save_checkpoint(str(tmp_path / "a"), step=7)
    manifest = json.loads((tmp_path / "a" / MANIFEST).read_text())
    assert {name: manifest[name] for name in ("format", "engine", "step", "model_type", "world_size")} == {
        "format": 1,
        "engine": "fsdp",
        "step": 7,
        "model_type": "qwen3",
        "world_size": 1,
    }
    assert manifest["parameters"]["model.embed_tokens.weight"] == [64, 64]
