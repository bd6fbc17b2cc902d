"""What a checkpoint of this engine is; that training goes on from it is in the conformance kit."""

from __future__ import annotations

import json

from fsdp_steps import build

from manymesh.parts.checkpoint_directory import MANIFEST


def test_what_a_killed_run_left_does_not_hinder_a_save(on, qwen3, tmp_path) -> None:
    (tmp_path / "a.partial").mkdir()
    (tmp_path / "a.partial" / "rest").write_text("half")
    engine = build(qwen3)
    engine.save_checkpoint(str(tmp_path / "a"), step=5)
    assert engine.load_checkpoint(str(tmp_path / "a")) == 5
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]
    assert not (tmp_path / "a" / "rest").exists()


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
