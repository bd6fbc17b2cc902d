"""A Hugging Face directory is read by the ranks that own its tensors, or refused by all before anything changes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from named_models import built, differing, random_dir, save, saved

from core.errors import Refused


def _shards(path: Path) -> Path:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(path).save_pretrained(path / "cut", max_shard_size="60KB")
    return path / "cut"


def test_a_directory_of_several_files_is_read_and_only_what_a_rank_has(on, model_dir) -> None:
    path = random_dir(model_dir, "qwen3_moe")
    truncated_path = str(_shards(Path(path)))
    assert len(list(Path(truncated_path).glob("*.safetensors"))) > 4

    def job(rank: int, world_size: int) -> tuple[int, int]:
        from manymesh_megatron.directory import SavedDirectory

        slices = []

        @attrs.define
        class Recorded:
            source: Any

            def __getitem__(self, index: Any) -> torch.Tensor:
                slices.append(self.source[index])
                return slices[-1]

        find = SavedDirectory.tensor
        with built(path, "tp2 ep2 etp2") as model, pytest.MonkeyPatch.context() as patch:
            patch.setattr(SavedDirectory, "tensor", lambda self, name: Recorded(find(self, name)))
            model.weights.read_directory(truncated_path)
            assert differing(dict(model.weights.export("all")), saved(path)) == []
            return sum(each.numel() for each in slices), sum(each.numel() for each in model.parameters.values())

    assert all(slices == size for slices, size in on(4, job))


def _drop(path: Path, *names: str) -> None:
    save(path, {name: each for name, each in saved(path).items() if name not in names})


def _lose_a_file(path: Path) -> None:
    truncated_path = _shards(path)
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_bytes((truncated_path / "model.safetensors.index.json").read_bytes())


SPOILT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda path: _drop(path, "model.norm.weight"), "1 missing: ['model.norm.weight']"),
    "shape": (lambda path: save(path, saved(path) | {"model.norm.weight": torch.ones(3)}), "another shape"),
    "unknown": (
        lambda path: save(path, saved(path) | {"model.layers.3.self_attn.q_proj.bias": torch.ones(64)}),
        "1 unknown: ['model.layers.3.self_attn.q_proj.bias']",
    ),
    "truncated": (lambda path: os.truncate(path / "model.safetensors", 5000), "cannot read 'model.safetensors'"),
    "no such file": (_lose_a_file, "cannot read 'model-00001-of-"),
    "no index": (
        lambda path: (_lose_a_file(path), (path / "model.safetensors.index.json").write_text('{"weight_map": 3}')),
        "is no index",
    ),
    "pickled": (lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"), "convert it"),
    "nothing": (lambda path: (path / "model.safetensors").unlink(), "has no model.safetensors"),
}


@pytest.mark.parametrize("fault", SPOILT)
def test_all_ranks_refuse_a_directory_of_other_weights_and_change_nothing(on, model_dir, tmp_path, fault) -> None:
    path = random_dir(model_dir, "qwen3")
    spoil, message = SPOILT[fault]
    spoilt = shutil.copytree(path, tmp_path / "spoilt")
    spoil(spoilt)

    def job(rank: int, world_size: int) -> tuple[str, bool]:
        with built(path, "tp2 pp2") as model:
            with pytest.raises(Refused) as refusal:
                model.weights.read_directory(str(spoilt))
            return str(refusal.value), model.unchanged()

    answers = on(4, job)
    assert message in answers[0][0]
    assert set(answers) == {(answers[0][0], True)}


def test_the_unused_head_and_buffers_of_old_directories_are_no_fault(on, model_dir, tmp_path) -> None:
    path = random_dir(model_dir, "tied")
    old = shutil.copytree(path, tmp_path / "old")
    more = {"lm_head.weight": torch.ones(64, 64), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save(old, saved(old) | more)

    def job(rank: int, world_size: int) -> None:
        with built(path, "pp2") as model:
            model.weights.read_directory(str(old))
            assert differing(dict(model.weights.export("all")), saved(path)) == []

    on(4, job)
