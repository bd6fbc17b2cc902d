"""What is known before a model is loaded, and two ranks side by side."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from core.config import structure
from core.errors import ConfigError, Refused
from core.mesh import MeshLayout
from manymesh_hf.config import HfRolloutConfig
from manymesh_hf.manifest import manymesh_manifests
from manymesh_hf.plan import plan
from manymesh_hf.rollout import HfRollout
from sdk.testing import RankPool


def test_listing_and_planning_import_nothing_heavy() -> None:
    code = (
        "import sys, manymesh_hf.manifest as m, manymesh_hf.plan as p, manymesh_hf.config as c;"
        "m.manymesh_manifests(); p.plan(c.HfRolloutConfig('x'), 2, None);"
        "print(sorted({'torch', 'transformers', 'ray', 'numpy', 'tensordict'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_manifest_names_what_is_there() -> None:
    [manifest] = manymesh_manifests()
    assert manifest.factory == f"{HfRollout.__module__}:{HfRollout.__name__}"
    assert manifest.config == f"{HfRolloutConfig.__module__}:{HfRolloutConfig.__name__}"
    assert manifest.planner == f"{plan.__module__}:{plan.__name__}"


def test_every_rank_is_its_own_dp_rank() -> None:
    planned = plan(HfRolloutConfig("x"), 3, None)
    planned.route.check("rollout")
    assert planned.layouts == {"dense": MeshLayout.of(dp=3)}
    assert planned.route.dp_ranks == planned.route.collectors == (0, 1, 2)
    with pytest.raises(Refused, match="world size 0"):
        plan(HfRolloutConfig("x"), 0, None)


def test_the_mesh_is_valid_before_the_model_is_looked_for() -> None:
    mesh = HfRollout(HfRolloutConfig("nowhere"), device="cpu").mesh
    assert (mesh.rank, mesh.dp_rank, mesh.dp_size, mesh.is_collect) == (0, 0, 1, True)


def test_the_config_is_checked() -> None:
    assert structure(HfRolloutConfig, {"model": "x", "max_batch_rows": 2}).max_batch_rows == 2
    with pytest.raises(ConfigError, match="max_batch_rows"):
        structure(HfRolloutConfig, {"model": "x", "max_batch_rows": 0})


PROMPTS = [[1, 5, 6], [7], [40, 41, 42], [9, 9]]


def generate_half(rank: int, world_size: int, directory: str) -> tuple[Any, ...]:
    import torch
    from tensordict import TensorDict

    from core.batch import jagged
    from core.protocols import SamplingParams

    rollout = HfRollout(HfRolloutConfig(directory), device="cpu")
    mesh = rollout.mesh
    rollout.initialize()
    mine = slice(0, None) if world_size == 1 else slice(2 * mesh.dp_rank, 2 * mesh.dp_rank + 2)
    batch = TensorDict({"prompt_id": torch.arange(4)[mine]}, batch_size=[len(PROMPTS[mine])])
    batch.set("prompt_ids", jagged([torch.tensor(row) for row in PROMPTS[mine]]))
    out = rollout.generate(batch, SamplingParams(num_samples=2, max_new_tokens=8, seed=1))
    place = (mesh.dp_rank, mesh.dp_size, mesh.is_collect, mesh.layout.size("dp"))
    return place, [row.tolist() for row in out["input_ids"].unbind()]


def test_two_ranks_generate_what_one_does(model_dir: str) -> None:
    [(_, whole)] = [generate_half(0, 1, model_dir)]
    with RankPool(2) as ranks:
        (place0, first), (place1, second) = ranks.run(generate_half, model_dir)
    assert (place0, place1) == ((0, 2, True, 2), (1, 2, True, 2))
    assert first + second == whole
