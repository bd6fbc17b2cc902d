"""vLLM in a pool and an environment of its own: driver and trainer run where no vLLM is installed.

MANYMESH_VLLM_PYTHON names the interpreter of the environment that has vLLM.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import attrs
import pytest
import ray
from rich.console import Console

from core.errors import Refused, TransferFailed
from core.group import RayClassWithInitArgs, WorkerGroup
from core.registry import EngineRegistry, Status
from core.transport.local import LocalWorkerGroup
from core.transport.ray import RayResourcePool, RayWorkerGroup
from manymesh.recipes.grpo.config import GrpoConfig
from manymesh.recipes.grpo.placement import Placement
from manymesh.recipes.grpo.tracking import REWARD, read_metrics
from manymesh.recipes.grpo.trainer import GrpoTrainer
from manymesh.recipes.grpo.workers import Workers
from manymesh.recipes.toy import write_copy_task, write_model
from manymesh.recipes.yaml_config import load_yaml, override
from manymesh.workers import ActorRolloutRefWorker, WeightSync
from sdk.testing import tiny_model
from tests.support.transfer_workers import MortalRollout

ROOT = Path(__file__).parents[4]
PYTHON = os.environ.get("MANYMESH_VLLM_PYTHON", str(ROOT / ".venv-vllm" / "bin" / "python"))
ENV = {"OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
STEPS, FIVE_BUCKETS = 6, 0.45

pytestmark = [
    pytest.mark.timeout(600),  # processes that load vLLM start slowly on a busy machine
    pytest.mark.skipif(not Path(PYTHON).is_file(), reason="no environment with vLLM: make test-vllm builds it"),
]


@attrs.frozen
class Pools:
    """A run of the example, finished, and its workers."""

    trainer: GrpoTrainer
    trainers: Any
    rollouts: Any
    metrics: list[dict[str, float]]

    def sync(self, kind: str, trainers: WorkerGroup | None = None, **options: Any) -> WeightSync:
        return WeightSync(trainers or self.trainers, [self.rollouts], kind=kind, **{"bucket_mb": 1, **options})

    def disagreement(self, version: int) -> float:
        """Of log-probabilities, at a temperature, the largest."""
        prompts, _ = self.trainer.data.batch(STEPS, 8)
        sampling = attrs.evolve(self.trainer.config.sampling, temperature=0.7, seed=1)
        rows = self.rollouts.generate_sequences(prompts, sampling, min_version=version)
        assert rows["weight_version"].tolist() == [version] * len(rows)
        scores = self.trainers.compute_log_prob(rows, temperature=0.7)
        columns = scores["old_log_probs"], rows["rollout_log_probs"], rows["response_mask"]
        ours, theirs, mask = (column.values() for column in columns)
        return float((ours - theirs)[mask].abs().max())


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    directory = tmp_path_factory.mktemp("apart")
    model = write_model(directory / "model", hidden_size=128)
    data = write_copy_task(directory / "copy.jsonl")
    overrides = [f"model.path={model}", f"data.path={data}", f"run.dir={directory / 'run'}", f"run.steps={STEPS}"]
    overrides += ["run.save_every=0", "run.export=false", f"rollout_pool.python={PYTHON}"]
    config = GrpoConfig.of(override(load_yaml(ROOT / "examples/grpo/vllm_two_pools.yaml"), overrides))
    trainer = GrpoTrainer(config)
    ray.init(num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        train = RayClassWithInitArgs(ActorRolloutRefWorker, Placement(config).worker())
        sample = RayClassWithInitArgs(MortalRollout, Placement(config).rollout_worker())
        with (
            RayResourcePool([1]) as room,
            RayResourcePool([1]) as other_room,
            RayWorkerGroup(room, train, name="trainers", env=ENV) as trainers,
            RayWorkerGroup(other_room, sample, name="rollouts", env=ENV, python=PYTHON) as rollouts,
        ):
            with WeightSync(trainers, [rollouts], kind=config.transfer.kind, bucket_mb=1) as sync:
                trainer.run(Workers(trainers, rollouts, sync), Console(file=StringIO()))
            yield Pools(trainer, trainers, rollouts, read_metrics(directory / "run" / "metrics.jsonl"))
    finally:
        ray.shutdown()


def test_the_workers_run_in_the_environment_of_their_pool(pools: Pools) -> None:
    if sys.prefix != str(Path(PYTHON).parents[1]):
        [entry] = [each for each in EngineRegistry.default().entries if each.name == "vllm"]
        assert entry.status is Status.MISSING_DEPENDENCY
        with pytest.raises(Refused, match="vllm is not installed"):
            Placement(attrs.evolve(pools.trainer.config, rollout_pool=pools.trainer.config.pool)).check()

    def home(group: Any) -> Path:
        """Of the environment that the worker's Ray was loaded from."""
        maps = Path(f"/proc/{group.identities[0].pid}/maps").read_text().splitlines()
        return Path(next(line.split()[-1] for line in maps if line.endswith("/_raylet.so")).partition("/lib/")[0])

    assert home(pools.rollouts) == Path(PYTHON).parents[1]
    assert home(pools.trainers) == Path(sys.prefix)


def test_the_example_samples_what_the_trainer_scores_and_begins_to_learn(pools: Pools) -> None:
    rewards = [line[REWARD] for line in pools.metrics]
    assert len(rewards) == STEPS
    assert max(line["rollout/log_prob_gap_max"] for line in pools.metrics) < 1e-4
    assert min(line["actor/grad_norm"] for line in pools.metrics) > 0
    assert rewards[0] < 0.1
    assert min(rewards[-2:]) > rewards[0] + 0.03


@pytest.mark.parametrize("kind", ["collective", "object_store"])
def test_a_step_by_each_kind_of_transfer_and_rollout_and_trainer_agree_only_after_it(pools: Pools, kind: str) -> None:
    trainer = pools.trainer
    with pools.sync(kind, bucket_mb=FIVE_BUCKETS) as sync:
        sync.sync()
        metrics, _ = trainer.step(Workers(pools.trainers, pools.rollouts, sync), STEPS)
        assert metrics["rollout/log_prob_gap_max"] < 1e-4
        sender, receiver = sync.receipts
        assert (sender.num_tensors, sender.digest) == (receiver.num_tensors, receiver.digest)
        version = sync.version
        assert version is not None
        assert pools.disagreement(version) < 1e-4
        lazy: Any = _Lazy()
        trainer.step(Workers(pools.trainers, pools.rollouts, lazy), STEPS)
        assert pools.disagreement(version) > 1e-3
        with pytest.raises(Refused, match="too old"):
            pools.disagreement(version + 1)
        assert pools.disagreement(sync.sync()) < 1e-4


class _Lazy:
    """A sync that sends nothing."""

    def sync(self) -> None: ...


@pytest.mark.parametrize("kind", ["collective", "object_store"])
def test_a_receiver_that_fails_at_the_third_of_five_buckets_generates_nothing_until_all_come_again(
    pools: Pools, kind: str
) -> None:
    with pools.sync(kind, bucket_mb=FIVE_BUCKETS) as sync:
        sync.sync()
        pools.rollouts.end_at_bucket(3, 0, "refuse")
        with pytest.raises(TransferFailed, match=r"the link is down[\s\S]*group 'rollouts', rank 0"):
            sync.sync()
        with pytest.raises(Refused, match="no valid weights"):
            pools.disagreement(0)
        assert pools.disagreement(sync.sync()) < 1e-4


def test_weights_of_another_model_are_refused_by_name_and_the_old_ones_stay(pools: Pools, tmp_path: Path) -> None:
    with pools.sync("collective") as sync:
        version = sync.sync()
    other = tiny_model(tmp_path / "other", hidden_size=128, vocab_size=16, tie_word_embeddings=False)
    worker = Placement(pools.trainer.config).worker()
    assert worker.actor is not None
    stranger = attrs.evolve(worker, actor=attrs.evolve(worker.actor, engine={**worker.actor.engine, "model": other}))
    with LocalWorkerGroup(RayClassWithInitArgs(ActorRolloutRefWorker, stranger)) as strangers:
        strangers.init_model()
        with (
            pools.sync("object_store", strangers) as sync,
            pytest.raises(Refused, match=r"matched[\s\S]*unexpected.*lm_head\.weight"),
        ):
            sync.sync()
    assert pools.disagreement(version) < 1e-4
