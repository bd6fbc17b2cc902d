"""GRPO with the rollout in a pool of its own: the same training as in one, whatever carries the weights."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import attrs
import pytest
from rich.console import Console

from core.errors import ConfigError, Refused
from core.group import RayClassWithInitArgs, WorkerGroup
from core.transport.local import LocalWorkerGroup
from manymesh.recipes.grpo.config import GrpoConfig
from manymesh.recipes.grpo.launch import worker_group
from manymesh.recipes.grpo.placement import Placement
from manymesh.recipes.grpo.tracking import TIME, read_metrics
from manymesh.recipes.grpo.trainer import GrpoTrainer
from manymesh.recipes.grpo.workers import Workers
from manymesh.recipes.yaml_config import load_yaml, override
from manymesh.workers import ActorRolloutRefWorker, Role


def config_of(toy: Path, directory: Path, **sections: Any) -> GrpoConfig:
    plain: dict[str, Any] = {
        "model": {"path": str(toy / "model")},
        "data": {"path": str(toy / "copy.jsonl")},
        "reward": {"function": "manymesh.recipes.grpo.reward:digit_share"},
        "pool": {"processes": [1], "use_gpu": False},
        "rollout_pool": {"processes": [1], "use_gpu": False},
        "actor": {"engine": {"optimizer": {"lr": 3e-3}}},
        "sampling": {"num_samples": 4, "max_new_tokens": 4},
        "algorithm": {"prompts_per_step": 4},
        "run": {"dir": str(directory), "steps": 3, "save_every": 0, "export": False},
    }
    return GrpoConfig.of({**plain, **sections})


def metrics_of(config: GrpoConfig, group: WorkerGroup | None = None) -> list[dict[str, float]]:
    """Train, on Ray where no group is given; the metrics that are no times."""
    trainer = GrpoTrainer(config)
    with nullcontext(Workers.shared(group)) if group else worker_group(config) as workers:
        trainer.run(workers, Console(file=sys.stdout, width=200))
    lines = read_metrics(Path(config.run.dir) / "metrics.jsonl")
    return [{key: value for key, value in line.items() if not key.startswith(TIME)} for line in lines]


@pytest.mark.ci
def test_a_rollout_in_its_own_pool_samples_and_trains_as_one_in_the_trainers_processes(
    ray_cluster: None, toy: Path, tmp_path: Path
) -> None:
    two_pools = metrics_of(config_of(toy, tmp_path / "split", transfer={"kind": "collective", "bucket_mb": 0.01}))
    config = config_of(toy, tmp_path / "one", rollout_pool=None)
    with LocalWorkerGroup(RayClassWithInitArgs(ActorRolloutRefWorker, Placement(config).worker())) as group:
        one = metrics_of(config, group)
    for ours, theirs in zip(two_pools, one, strict=True):
        assert ours["rollout/log_prob_gap_max"] < 1e-4
        assert ours["actor/grad_norm"] > 0
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["collective", "object_store", "disk"])
def test_every_kind_of_transfer_feeds_two_rollouts_and_a_reference_stays_with_the_trainer(
    ray_cluster: None, toy: Path, tmp_path: Path, kind: str
) -> None:
    options = {"directory": str(tmp_path / "weights")} if kind == "disk" else {}
    transfer = {"kind": kind, "bucket_mb": 0.01, "options": options}
    pools = {"rollout_pool": {"processes": [2], "use_gpu": False}, "loss": {"kl_coef": 0.01}}
    config = config_of(toy, tmp_path / "split", transfer=transfer, **pools)
    assert Placement(config).worker().role is Role.ACTOR_REF
    one = metrics_of(attrs.evolve(config, rollout_pool=None, run=attrs.evolve(config.run, dir=str(tmp_path / "one"))))
    for ours, theirs in zip(metrics_of(config), one, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)


def test_the_example_of_two_pools_can_be_run_once_it_is_given_model_data_and_a_place(toy: Path, tmp_path: Path) -> None:
    example = load_yaml(Path(__file__).parents[2] / "examples/grpo/two_pools.yaml")
    options = [f"model.path={toy / 'model'}", f"data.path={toy / 'copy.jsonl'}", f"run.dir={tmp_path}"]
    config = GrpoConfig.of(override(example, options))
    Placement(config).check()
    assert (config.pool.world_size, config.world_size, config.transfer.kind) == (1, 3, "collective")


def test_pools_and_transfers_are_checked_before_a_process_is_started(toy: Path, tmp_path: Path) -> None:
    def refused(error: type[Refused], message: str, **sections: Any) -> None:
        with pytest.raises(error, match=message):
            Placement(config_of(toy, tmp_path, **sections)).check()

    Placement(config_of(toy, tmp_path)).check()
    refused(ConfigError, "multiple of 3", rollout_pool={"processes": [3], "use_gpu": False})
    refused(Refused, "did you mean 'collective'", transfer={"kind": "colective"})
    refused(ConfigError, "directory", transfer={"kind": "disk"})
    refused(ConfigError, "did you mean 'bucket_mb'", transfer={"bucketmb": 1})
    Placement(config_of(toy, tmp_path, rollout_pool=None, transfer={"kind": "colective"})).check()  # not used


def test_workers_run_in_the_environment_that_their_pool_names(toy: Path, tmp_path: Path) -> None:
    assert Placement(config_of(toy, tmp_path)).python("rollout") is None
    pool = {"processes": [1], "python": "their/python"}
    placement = Placement(config_of(toy, tmp_path, rollout_pool=pool))
    assert (placement.python("actor"), placement.python("rollout")) == (None, "their/python")
    with pytest.raises(Refused, match=r"their/python is no Python"):
        placement.check()
