"""GRPO on two meshes of four ranks: the policy in tensor and pipeline parallel parts, and a whole rollout a rank."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from rich.console import Console
from tensordict import TensorDict

from core.batch import row_lengths, select, to_padded
from core.errors import Refused
from core.group import RayClassWithInitArgs, WorkerGroup
from core.transport.local import LocalWorkerGroup
from manymesh.recipes.grpo.config import GrpoConfig
from manymesh.recipes.grpo.launch import worker_group
from manymesh.recipes.grpo.placement import Placement
from manymesh.recipes.grpo.tracking import REWARD, TIME, read_metrics
from manymesh.recipes.grpo.trainer import GrpoTrainer
from manymesh.recipes.grpo.workers import Workers
from manymesh.recipes.toy import write_copy_task, write_model
from manymesh.recipes.yaml_config import laid_over, load_yaml, override
from manymesh.workers import ActorRolloutRefWorker
from sdk.reference import PlainTrainer

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo" / "megatron.yaml"
STEPS, TEMPERATURE = 3, 0.8


def config_of(toy: Path, directory: Path, *overrides: str) -> GrpoConfig:
    """The example's config, on the toy, with a reference, two optimizer steps a step, and odd numbers of tokens."""
    plain: dict[str, Any] = {
        "model": {"path": str(toy / "model")},
        "data": {"path": str(toy / "copy.jsonl")},
        "reward": {"function": "manymesh.recipes.grpo.reward:digit_share"},
        "pool": {"use_gpu": False},
        "actor": {"engine": {"optimizer": {"lr": 3e-3}}, "micro_batch": {"max_tokens": 40}},
        "sampling": {"num_samples": 4, "max_new_tokens": 5, "temperature": TEMPERATURE},
        "algorithm": {"prompts_per_step": 4, "num_mini_batches": 2},
        "loss": {"kl_coef": 0.01, "entropy_coef": 0.01},
        "run": {"dir": str(directory), "steps": STEPS, "save_every": 2},
    }
    return GrpoConfig.of(override(laid_over(load_yaml(EXAMPLE), plain), overrides))


def timeless(directory: Path) -> list[dict[str, Any]]:
    lines = read_metrics(directory / "metrics.jsonl")
    return [{key: value for key, value in line.items() if not key.startswith(TIME)} for line in lines]


@attrs.frozen
class Run:
    """A finished run, and its workers."""

    trainer: GrpoTrainer
    workers: Workers
    directory: Path
    start: str  # the model that it began with

    @property
    def group(self) -> WorkerGroup:
        """Of all workers."""
        return self.workers.trainers

    def sample(self) -> TensorDict:
        """Rows of a step that is not trained on."""
        prompts, _ = self.trainer.data.batch(STEPS, 4)
        sampling = attrs.evolve(self.trainer.config.sampling, seed=1)
        batch: TensorDict = self.group.generate_sequences(prompts, sampling)
        return batch


@pytest.fixture(scope="module")
def toy_of_two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("toy")
    write_model(directory / "model", hidden_size=32, num_layers=2)
    write_copy_task(directory / "copy.jsonl", num_rows=50)
    return directory


@pytest.fixture(scope="module")
def run(ray_cluster: None, toy_of_two_layers: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    directory = tmp_path_factory.mktemp("runs") / "megatron"
    config = config_of(toy_of_two_layers, directory, "actor.engine.sequence_parallel=true")
    trainer = GrpoTrainer(config)
    with worker_group(config) as workers:
        trainer.run(workers, Console(file=StringIO()))
        yield Run(trainer, workers, directory, config.model.path)


@pytest.mark.ci
def test_the_run_has_the_metrics_of_fsdp_on_one_rank(run: Run, toy_of_two_layers: Path, tmp_path: Path) -> None:
    engine = {"optimizer": {"lr": 3e-3}}
    config = config_of(toy_of_two_layers, tmp_path / "fsdp", "pool.processes=[1]", f"actor.engine={engine}")
    config = attrs.evolve(config, actor=attrs.evolve(config.actor, backend="fsdp"))
    with LocalWorkerGroup(RayClassWithInitArgs(ActorRolloutRefWorker, Placement(config).worker())) as group:
        GrpoTrainer(config).run(Workers.shared(group), Console(file=StringIO()))
    ours, theirs = timeless(run.directory), timeless(tmp_path / "fsdp")
    assert len(ours) == STEPS
    for line, other in zip(ours, theirs, strict=True):
        assert line == pytest.approx(other, rel=1e-3, abs=1e-5)
        assert line["actor/grad_norm"] > 0
        assert line["actor/ref_kl"] > 1e-4
        assert line["rollout/log_prob_gap_max"] < 1e-4
    assert sum(line[REWARD] for line in ours) > 0


@pytest.mark.ci
def test_rows_are_dealt_by_each_mesh_of_its_own(run: Run) -> None:
    actor, rollout = run.group.route("actor"), run.group.route("rollout")
    assert (actor.dp_size, actor.collected) == (1, frozenset({2}))  # the last stage's first rank
    assert run.group.route("ref") == actor
    assert (rollout.dp_size, rollout.collected) == (4, frozenset(range(4)))


@pytest.mark.ci
def test_rollout_and_exported_model_have_the_weights_that_the_trainer_has(run: Run) -> None:
    samples = run.sample()
    assert samples["weight_version"].tolist() == [run.workers.sync.version] * 16
    assert len(set(row_lengths(samples).tolist())) > 1
    scores = run.group.compute_log_prob(samples, TEMPERATURE)
    mask = samples["response_mask"].values()
    gap = (samples["rollout_log_probs"].values() - scores["old_log_probs"].values())[mask]
    assert gap.abs().max() < 1e-4
    padded = to_padded(samples)
    want = PlainTrainer(str(run.directory / "model")).outputs(padded, TEMPERATURE)
    real = padded["attention_mask"]
    assert torch.allclose(scores["old_log_probs"].values(), want["log_probs"][real], atol=1e-4)
    assert torch.allclose(scores["entropy"].values(), want["entropy"][real], atol=1e-4)


@pytest.mark.ci
def test_the_reference_is_what_the_policy_began_as(run: Run) -> None:
    samples = run.sample()
    have = run.group.compute_ref_log_prob(samples, TEMPERATURE)["ref_log_probs"].values()
    padded = to_padded(samples)
    want = PlainTrainer(run.start).outputs(padded, TEMPERATURE)["log_probs"][padded["attention_mask"]]
    assert torch.allclose(have, want, atol=1e-5)
    assert (have - run.group.compute_log_prob(samples, TEMPERATURE)["old_log_probs"].values()).abs().max() > 1e-2


@pytest.mark.ci
def test_one_row_alone_is_answered_as_it_is_among_others(run: Run) -> None:
    samples = run.sample()
    among = select(run.group.compute_log_prob(samples, TEMPERATURE), torch.tensor([5]))
    alone = run.group.compute_log_prob(select(samples, torch.tensor([5])), TEMPERATURE)
    assert torch.allclose(alone["old_log_probs"].values(), among["old_log_probs"].values(), atol=1e-5)


@pytest.mark.ci
def test_from_a_checkpoint_a_step_is_what_it_was(run: Run) -> None:
    """Weights, optimizer and version come back; so a later step is the one that was trained."""
    path = run.trainer.directory.checkpoints.directory / "step-2" / "actor"
    assert run.group.load_checkpoint(str(path)) == 2
    assert run.workers.sync.sync() > STEPS  # never one version for two sets of weights
    again, _ = run.trainer.step(run.workers, 2)
    was = timeless(run.directory)[2]
    assert {name: again.get(name, 3) for name in was} == pytest.approx(was, rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["actor.engine.tensor_parallel=3"], "tensor_parallel=3"),
        (["pool.processes=[6]"], "6 ranks"),
        (["actor.engine.pipeline_parallel=4", "pool.processes=[8]"], "num_hidden_layers=2"),
        (["algorithm.prompts_per_step=6"], "prompts_per_step 4 or 8"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused_before_a_process_is_started(
    changes: list[str], message: str, toy_of_two_layers: Path, tmp_path: Path
) -> None:
    with pytest.raises(Refused, match=message):
        Placement(config_of(toy_of_two_layers, tmp_path, *changes)).check()
