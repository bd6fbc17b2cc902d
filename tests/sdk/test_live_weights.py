"""A live model's memory by saved names, and a rollout over it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDict

from core.config import RolloutConfig
from core.errors import Refused
from core.manifest import Plan
from core.mesh import MeshLayout
from core.rollout import SamplingParams
from manymesh.parts.live_weights import WeightTable
from manymesh.parts.model_rollout import ModelRollout
from manymesh.parts.pretrained import load_causal_lm
from manymesh.parts.world_mesh import world_mesh, world_size
from sdk.testing import tiny_model

FAMILIES = ("qwen3", "qwen3_moe")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """Two models of each family that differ in their weights."""
    paths = {}
    for family in FAMILIES:
        one, other = (tiny_model(tmp_path_factory.mktemp(family), family, seed=seed) for seed in (1, 2))
        paths[family] = (one, other)
    return paths


def saved(directory: str) -> dict[str, torch.Tensor]:
    return load_file(f"{directory}/model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_has_what_save_pretrained_writes_and_writes_through(
    models: dict[str, tuple[str, str]], family: str
) -> None:
    one, other = models[family]
    table = WeightTable(load_causal_lm(one, "float32"))
    specs, want = {spec.name: spec for spec in table.specs()}, saved(one)
    assert {name: spec.shape for name, spec in specs.items()} == {name: tuple(t.shape) for name, t in want.items()}
    assert {spec.dtype for spec in specs.values()} == {"float32"}
    assert specs["model.layers.0.self_attn.q_proj.weight"].together == "model.layers.0.self_attn.qkv_proj.weight"
    assert all(torch.equal(table.target(name), tensor) for name, tensor in want.items())
    table.load(iter(saved(other).items()))
    assert all(torch.equal(table.target(name), tensor) for name, tensor in saved(other).items())


def test_a_stream_that_lacks_a_weight_is_refused(models: dict[str, tuple[str, str]]) -> None:
    one, other = models["qwen3"]
    weights = saved(other)
    weights.pop("model.norm.weight")
    with pytest.raises(Refused, match=r"missing[\s\S]*model\.norm\.weight"):
        WeightTable(load_causal_lm(one, "float32")).load(iter(weights.items()))


class Loaded(ModelRollout):
    """A rollout of the model in a directory, which generates nothing."""

    def __init__(self, directory: str) -> None:
        layout = MeshLayout.of(dp=1)
        config = RolloutConfig(directory)
        super().__init__(config, "cpu", world_mesh(Plan(layout, layout.route(("dp",)))))

    def _load_model(self) -> Any:
        return load_causal_lm(self._config.model, "float32")

    def generate(self, prompts: TensorDict, sampling: SamplingParams, *, min_version: int | None = None) -> TensorDict:
        raise Refused("this rollout generates nothing")

    def tensors(self) -> dict[str, torch.Tensor]:
        table = WeightTable(self._model)
        return {spec.name: table.target(spec.name) for spec in table.specs()}

    def version(self) -> int | None:
        """A call, since mypy takes what a property once gave for all time."""
        return self.weight_version


def test_versions_follow_updates_releases_and_aborts(models: dict[str, tuple[str, str]]) -> None:
    one, other = models["qwen3"]
    rollout, new = Loaded(one), list(saved(other).items())
    with pytest.raises(Refused, match="initialize"):
        rollout.begin_weight_update([], 1)
    rollout.initialize()
    specs = WeightTable(rollout._model).specs()
    assert rollout.version() == 0
    rollout.begin_weight_update(specs, 1)
    assert rollout.version() is None
    with pytest.raises(Refused, match="bucket"):
        rollout.load_bucket([("strange", new[0][1])])
    rollout.load_bucket([])
    rollout.abort_weight_update()
    assert rollout.version() == 0, "nothing was loaded: a refused bucket and an empty one change nothing"
    assert all(torch.equal(tensor, saved(one)[name]) for name, tensor in rollout.tensors().items())
    rollout.begin_weight_update(specs, 1)
    rollout.load_bucket(new[:3])
    rollout.abort_weight_update()
    assert rollout.version() is None
    rollout.release(["weights"])
    with pytest.raises(Refused, match=r"resume\(\['weights'\]\)"):
        rollout.begin_weight_update(specs, 2)
    rollout.resume(["weights"])
    rollout.begin_weight_update(specs, 2)
    rollout.load_bucket(new)
    rollout.finish_weight_update()
    assert rollout.version() == 2
    assert all(torch.equal(tensor, saved(other)[name]) for name, tensor in rollout.tensors().items())


def spoil_config(directory: Path) -> None:
    (directory / "config.json").write_text("{")


def cut_weights(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def drop_weight(directory: Path) -> None:
    weights = saved(str(directory))
    weights.pop("model.norm.weight")
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def reshape_weight(directory: Path) -> None:
    weights = saved(str(directory)) | {"model.norm.weight": torch.ones(7)}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def another_kind(directory: Path) -> None:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "nobody-has-this"}))


@pytest.mark.parametrize("spoil", [spoil_config, cut_weights, drop_weight, reshape_weight, another_kind])
def test_a_directory_without_a_whole_model_is_refused_by_its_path(tmp_path: Path, spoil: Any) -> None:
    directory = tiny_model(tmp_path / "model")
    spoil(tmp_path / "model")
    with pytest.raises(Refused) as raised:
        load_causal_lm(directory, "float32")
    assert directory in str(raised.value)
    assert raised.value.mend


def test_without_a_process_group_a_backend_is_alone_and_its_mesh_has_no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    assert world_size() == 1
    layout = MeshLayout.of(dp=1)
    mesh = world_mesh(Plan(layout, layout.route(("dp",))))
    assert (mesh.rank, mesh.dp_rank, mesh.dp_size, mesh.is_collect) == (0, 0, 1, True)
    with pytest.raises(Refused, match="no process groups"):
        mesh.group("dp")
