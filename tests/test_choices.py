"""Workers build what the driver chose, or say what they have instead."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from core import LocalWorkerGroup, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from core.errors import RegistryError
from core.registry import EngineRegistry
from manymesh.recipes.grpo.config import GrpoConfig
from manymesh.recipes.grpo.placement import Placement
from manymesh.workers import RolloutWorker, RolloutWorkerConfig, TrainingWorker, TrainingWorkerConfig
from tests.fake_distributions import BACKEND, forget, install, manifest, plugin


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """On this process's path, and on no worker's."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    forget(tmp_path)


def test_a_plugin_on_the_drivers_path_alone_is_refused_by_the_worker_with_distribution_version_and_node(
    site: Path, ray_cluster: None
) -> None:
    install(site, "acme-toy", {"acme_toy.py": plugin(manifest("toy", "acme_toy")), "acme_toy_backend.py": BACKEND})
    choice = EngineRegistry.discover({}).find("toy").choice
    config = TrainingWorkerConfig(backend="toy", choice=choice)
    with RayResourcePool([1], name="toy") as pool, pytest.raises(RegistryError, match="not what the driver") as raised:
        RayWorkerGroup(pool, RayClassWithInitArgs(TrainingWorker, config))
    message = str(raised.value)
    assert "engine 'toy' of acme-toy 1.0" in message
    assert "no distribution acme-toy" in message
    assert socket.gethostname() in message
    assert "pip install acme-toy==1.0 on every node" in message


def test_another_version_than_the_drivers_is_refused_before_anything_is_built() -> None:
    choice = EngineRegistry.get("hf", kind="rollout").choice
    assert choice is not None
    config = RolloutWorkerConfig(engine={"model": "nowhere"}, choice=attrs.evolve(choice, version="9.9"))
    group = LocalWorkerGroup(RayClassWithInitArgs(RolloutWorker, config))
    with pytest.raises(RegistryError, match="not what the driver chose") as raised:
        group.init_model()
    assert raised.value.want == "rollout 'hf' of manymesh-hf 9.9"


def test_the_recipe_hands_its_workers_what_its_driver_found(tmp_path: Path) -> None:
    config = GrpoConfig.of(
        {
            "model": {"path": str(tmp_path)},
            "data": {"path": "rows.jsonl"},
            "reward": {"function": "manymesh.recipes.grpo.reward:digit_share"},
            "loss": {"kl_coef": 0.1},
            "run": {"dir": str(tmp_path / "run"), "steps": 1},
        }
    )
    worker = Placement(config).worker()
    for part, kind in ((worker.actor, "engine"), (worker.ref, "engine"), (worker.rollout, "rollout")):
        assert part is not None
        assert part.choice == EngineRegistry.get(part.backend, kind=kind).choice
        assert part.choice is not None
