"""TrainingWorkers on Ray with pipeline stages: what the driver gets is what one rank of another backend gives it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch

from core.batch import row_lengths
from core.errors import Refused
from core.group import RayClassWithInitArgs, WorkerGroup
from core.loss import LossSpec
from core.transport.local import LocalWorkerGroup
from core.transport.ray import RayResourcePool, RayWorkerGroup
from manymesh.workers import MicroBatchConfig, TrainingWorker, TrainingWorkerConfig
from sdk.testing import tiny_model
from tests.support.batches import training_batch

# One rank's numbers for every layout of stages are plugins/megatron/tests/test_numbers.py's, in the base suite.
pytestmark = pytest.mark.ci

ROWS = 16
BATCH = training_batch(ROWS)
WARM = 0.8  # the policy's temperature
LOSS = LossSpec("manymesh.recipes.grpo.loss:policy_loss", {"kl_coef": 0.1, "entropy_coef": 0.01})


@pytest.fixture(scope="module")
def pair(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WorkerGroup, WorkerGroup]]:
    """Megatron on four ranks, dp 2 x pp 2, and FSDP on one, on the same model.

    Of so few tokens that dp ranks have different numbers of micro-batches.
    """
    model = tiny_model(tmp_path_factory.mktemp("pipelined") / "model", initializer_range=0.1)
    options: dict[str, Any] = {"model": model, "optimizer": {"lr": 1e-3}}
    fsdp = TrainingWorkerConfig(
        backend="fsdp", engine=options, micro_batch=MicroBatchConfig(max_tokens=100), loss=LOSS, device="cpu"
    )
    megatron = attrs.evolve(fsdp, backend="megatron", engine={**options, "pipeline_parallel": 2})
    with (
        LocalWorkerGroup(RayClassWithInitArgs(TrainingWorker, fsdp)) as alone,
        RayResourcePool([4], use_gpu=False, name="pipelined") as pool,
        RayWorkerGroup(pool, RayClassWithInitArgs(TrainingWorker, megatron), env={"OMP_NUM_THREADS": "1"}) as group,
    ):
        for each in (alone, group):
            each.reset()
        yield group, alone


def test_rows_are_dealt_to_both_stages_and_come_back_from_the_last_in_order(
    pair: tuple[WorkerGroup, WorkerGroup],
) -> None:
    group, alone = pair
    route = group.route("train")
    assert (route.dp_ranks, route.collected) == ((0, 1, 0, 1), frozenset({2, 3}))
    assert len(set(row_lengths(BATCH).tolist())) == ROWS  # a row in another's place would be seen
    outputs, _ = group.infer_batch(BATCH, ("log_probs", "entropy"), temperature=WARM)
    want, _ = alone.infer_batch(BATCH, ("log_probs", "entropy"), temperature=WARM)
    assert row_lengths(outputs).tolist() == row_lengths(BATCH).tolist()
    for name in ("log_probs", "entropy"):
        assert torch.allclose(outputs[name].values(), want[name].values(), atol=1e-5)
    assert want["log_probs"].values().std() > 0.1


def test_an_evaluation_loss_comes_from_the_last_stage_too(pair: tuple[WorkerGroup, WorkerGroup]) -> None:
    (nothing, metrics), (_, want) = (each.infer_batch(BATCH, (), with_loss=True, temperature=WARM) for each in pair)
    assert nothing is None
    assert metrics == pytest.approx(want, rel=1e-4)


def test_what_a_worker_refuses_is_refused_on_all_stages_and_the_group_goes_on(
    pair: tuple[WorkerGroup, WorkerGroup],
) -> None:
    group, _ = pair
    with pytest.raises(Refused, match="no output"):
        group.infer_batch(BATCH, ("values",))
    with pytest.raises(Refused, match="lacks columns that the loss reads: advantages"):
        group.train_batch(BATCH.exclude("advantages"))
    with pytest.raises(Refused, match="nearest legal sizes: 12, 18"):
        group.train_mini_batch(BATCH, 3)
    assert not group.failed


def test_mini_batches_and_epochs_give_the_metrics_and_the_policy_of_one_rank(
    pair: tuple[WorkerGroup, WorkerGroup],
) -> None:
    metrics, want = (each.train_mini_batch(BATCH, 2, 2, temperature=WARM) for each in pair)
    assert metrics == pytest.approx(want, rel=1e-4)
    assert want["approx_kl"] > 0
    assert metrics["num_tokens"] == 2 * int(BATCH["response_mask"].values().sum())
    (outputs, _), (want_outputs, _) = (each.infer_batch(BATCH, temperature=WARM) for each in pair)
    assert torch.allclose(outputs["log_probs"].values(), want_outputs["log_probs"].values(), atol=1e-4)
