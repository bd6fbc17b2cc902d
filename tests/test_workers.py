"""The workers on real engines: layouts never change the numbers; policy and rollout speak of the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from tensordict import TensorDict
from torch.distributed.tensor import DTensor

from core._rows.shards import Block, Shard, deal_rows
from core.batch import jagged_from, metadata, num_rows, row_lengths, select, take, to_padded
from core.errors import BadAnswer, ConfigError, Refused
from core.group import RayClassWithInitArgs
from core.loss import LossSpec
from core.rollout import LogProbKind, SamplingParams
from core.transport.local import LocalWorkerGroup
from core.worker import WorkerContext, placed
from manymesh.recipes.grpo.workers import Workers
from manymesh.workers import (
    ActorRolloutRefConfig,
    ActorRolloutRefWorker,
    MicroBatchConfig,
    Role,
    RolloutWorkerConfig,
    TrainingWorker,
    TrainingWorkerConfig,
)
from manymesh.workers.export import export_directory
from sdk.testing import RankPool, tiny_model
from tests.support.batches import training_batch

LOSS = "manymesh.recipes.grpo.loss:policy_loss"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("workers") / "model")


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Workers made in a test have a world of their own."""
    with placed(WorkerContext()):
        yield


def worker_config(
    model: str, max_rows: int = 8, packing: bool = False, *, lr: float = 1e-3, **loss: Any
) -> TrainingWorkerConfig:
    engine = {"model": model, "packing": packing, "optimizer": {"lr": lr, "max_grad_norm": 0.0}}
    return TrainingWorkerConfig(
        engine=engine, micro_batch=MicroBatchConfig(max_rows=max_rows), loss=LossSpec(LOSS, {"kl_coef": 0.1, **loss})
    )


def train(
    rank: int, world_size: int, config: TrainingWorkerConfig, batch: TensorDict, num_mini_batches: int = 1
) -> tuple[dict[str, float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """One call of train_mini_batch: this rank's metrics, the last gradient and the weights afterwards."""
    shards = deal_rows(
        num_rows(batch),
        world_size,
        num_mini_batches,
        "a test",
        tokens=row_lengths(batch).tolist(),
        groups=batch["group_id"].tolist() if "group_id" in batch.keys() else None,  # noqa: SIM118
    )
    with placed(WorkerContext(rank=rank, world_size=world_size), shards[rank]):
        worker = TrainingWorker(config)
        worker.reset()
        metrics = worker.train_mini_batch(take(batch, shards[rank].ranges()), num_mini_batches)
    engine: Any = worker.engine
    parameters = dict(engine._state.model.named_parameters())
    gradient = {name: full(parameter.grad) for name, parameter in parameters.items()}
    weights = {name: full(parameter.detach()) for name, parameter in parameters.items()}
    return {name: metric.total for name, metric in metrics.items()}, gradient, weights


def full(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole


def relative(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm of `b`."""
    difference = sum(float((a[name] - b[name]).square().sum()) for name in b)
    return float((difference / sum(float(each.square().sum()) for each in b.values())) ** 0.5)


@pytest.mark.parametrize("normalise", ["token-mean", "sequence-mean"])
def test_loss_and_gradient_are_the_same_for_any_dp_micro_batching_and_packing(
    model: str, two_ranks: RankPool, four_ranks: RankPool, normalise: str
) -> None:
    batch = training_batch()
    losses, gradient, _ = train(0, 1, worker_config(model, normalise=normalise), batch)
    assert relative(gradient, {name: torch.zeros_like(g) + 1e-9 for name, g in gradient.items()}) > 1
    layouts: list[tuple[RankPool | None, int, bool]] = [
        (None, 4, False),
        (None, 1, False),
        (None, 8, True),
        (None, 2, True),
        (two_ranks, 8, False),
        (two_ranks, 1, True),
        (four_ranks, 2, False),
        (four_ranks, 1, False),
    ]
    for ranks, max_rows, packing in layouts:
        config = worker_config(model, max_rows, packing, normalise=normalise)
        answers = ranks.run(train, config, batch) if ranks else [train(0, 1, config, batch)]
        assert sum(answer[0]["loss"] for answer in answers) == pytest.approx(losses["loss"], rel=1e-5, abs=1e-7)
        assert answers[0][0]["grad_norm"] == pytest.approx(losses["grad_norm"], rel=1e-5)
        assert relative(answers[0][1], gradient) < 1e-5, (max_rows, packing)


def test_dp_never_changes_which_rows_make_an_optimizer_step(model: str, two_ranks: RankPool) -> None:
    config, batch = worker_config(model), training_batch()
    before = train(0, 1, worker_config(model, lr=0.0), batch)[2]
    alone = train(0, 1, config, batch, 2)[2]
    together = two_ranks.run(train, config, batch, 2)[0][2]
    movement = {name: alone[name] - before[name] for name in alone}
    error = {name: together[name] - before[name] for name in alone}
    assert relative(error, movement) < 1e-3


def test_ranks_with_fewer_micro_batches_run_filler_that_counts_nothing(model: str, two_ranks: RankPool) -> None:
    # Rank 0 gets the long rows: by tokens it needs more micro-batches than rank 1.
    batch = training_batch(8)
    order = torch.argsort(batch["input_ids"].offsets().diff(), descending=True)
    batch = select(batch, order)
    whole = attrs.evolve(worker_config(model), micro_batch=MicroBatchConfig(max_tokens=10_000))
    split_config = attrs.evolve(whole, micro_batch=MicroBatchConfig(max_tokens=64))
    losses, gradient, _ = train(0, 1, whole, batch)
    answers = two_ranks.run(train, split_config, batch)
    assert sum(answer[0]["loss"] for answer in answers) == pytest.approx(losses["loss"], rel=1e-5, abs=1e-7)
    assert relative(answers[0][1], gradient) < 1e-5


def pairs() -> TensorDict:
    """Four pairs, rows of a pair far from each other."""
    batch = training_batch(8)
    batch["group_id"] = torch.tensor([30, 10, 0, 10, 20, 0, 30, 20])
    return batch


def pair_config(model: str, packing: bool = False, **micro_batch: Any) -> TrainingWorkerConfig:
    loss = LossSpec("tests.support.losses:PairLoss")
    return attrs.evolve(worker_config(model, packing=packing), loss=loss, micro_batch=MicroBatchConfig(**micro_batch))


def test_pairs_are_parted_neither_over_ranks_nor_micro_batches_so_their_loss_is_that_of_one_process(
    model: str, two_ranks: RankPool
) -> None:
    losses, gradient, _ = train(0, 1, pair_config(model), pairs())
    assert losses["pairs"] == 4
    layouts: list[tuple[RankPool | None, bool, dict[str, Any]]] = [
        (None, False, {"max_rows": 2}),
        (None, True, {"max_rows": 5}),
        (two_ranks, False, {"max_rows": 2}),
        (two_ranks, True, {"max_rows": 4}),
        (two_ranks, False, {"max_tokens": 121}),  # another number of micro-batches on each rank
    ]
    for ranks, packing, micro_batch in layouts:
        config = pair_config(model, packing, **micro_batch)
        answers = ranks.run(train, config, pairs()) if ranks else [train(0, 1, config, pairs())]
        assert sum(answer[0]["loss"] for answer in answers) == pytest.approx(losses["loss"], rel=1e-5)
        assert sum(answer[0]["pairs"] for answer in answers) == 4
        assert relative(answers[0][1], gradient) < 1e-5, (packing, micro_batch)


def test_pairs_make_the_same_optimizer_steps_for_any_dp(model: str, two_ranks: RankPool) -> None:
    before = train(0, 1, worker_config(model, lr=0.0), training_batch())[2]
    alone = train(0, 1, pair_config(model, max_rows=2), pairs(), 2)[2]
    together = two_ranks.run(train, pair_config(model, max_rows=2), pairs(), 2)[0][2]
    movement = {name: alone[name] - before[name] for name in alone}
    assert relative({name: together[name] - before[name] for name in alone}, movement) < 1e-3


def refusal_of(rank: int, world_size: int, config: TrainingWorkerConfig, batch: TensorDict) -> str:
    try:
        train(rank, world_size, config, batch)
    except Refused as refused:
        return str(refused)
    return ""


def test_a_group_beyond_the_budget_of_one_rank_is_refused_on_all_before_anything_runs(
    model: str, two_ranks: RankPool
) -> None:
    answers = two_ranks.run(refusal_of, pair_config(model, max_tokens=100), pairs())
    assert answers[0] == answers[1]
    assert "belong together and do not fit into one micro-batch" in answers[0]
    assert "max_tokens 100" in answers[0]


def test_groups_that_mini_batches_would_part_are_refused_where_nobody_dealt_the_rows(trainer: TrainingWorker) -> None:
    batch = pairs()
    with pytest.raises(Refused, match=r"different mini-batches(.|\n)*0, 30"):
        trainer.train_mini_batch(batch, 2)
    batch["group_id"] = torch.zeros(8)
    with pytest.raises(Refused, match=r"torch.int64 \(rows,\)"):
        trainer.train_mini_batch(batch)


@pytest.fixture(scope="module")
def trainer(model: str) -> TrainingWorker:
    with placed(WorkerContext()):
        worker = TrainingWorker(worker_config(model, max_rows=3))
        worker.reset()
    return worker


def test_outputs_come_in_the_rows_order_and_in_the_batchs_form(trainer: TrainingWorker) -> None:
    batch = training_batch()
    answer = trainer.infer_batch(batch, ("log_probs", "entropy"))
    assert answer is not None
    outputs = answer[0]
    assert outputs is not None
    for row in range(8):
        single = trainer.infer_batch(take(batch, [(row, row + 1)]))
        assert single is not None
        assert single[0] is not None
        assert torch.allclose(
            take(outputs, [(row, row + 1)])["log_probs"].values(), single[0]["log_probs"].values(), atol=1e-5
        )
    assert (outputs["log_probs"] * batch["input_ids"]).shape[0] == 8  # they share their offsets
    padded = trainer.infer_batch(to_padded(batch, multiple=7))
    assert padded is not None
    assert padded[0] is not None
    mask = to_padded(batch, multiple=7)["attention_mask"]
    assert padded[0]["log_probs"].shape == mask.shape
    assert torch.allclose(padded[0]["log_probs"][mask], outputs["log_probs"].values(), atol=1e-5)


def test_an_evaluation_loss_is_the_training_loss_without_a_step(trainer: TrainingWorker, model: str) -> None:
    batch = training_batch()
    answer = trainer.infer_batch(batch, (), with_loss=True)
    assert answer is not None
    assert answer[0] is None
    assert answer[1]["loss"].value == pytest.approx(train(0, 1, worker_config(model), batch)[0]["loss"], rel=1e-5)


def test_bad_requests_are_refused_and_the_worker_stays_healthy(trainer: TrainingWorker, model: str) -> None:
    batch = training_batch()
    with pytest.raises(Refused, match="no output"):
        trainer.infer_batch(batch, ("values",))
    with pytest.raises(Refused, match="equal mini-batches"):
        trainer.train_mini_batch(batch, 3)
    with pytest.raises(Refused, match="lacks columns that the loss reads: advantages"):
        trainer.train_batch(batch.exclude("advantages"))
    with pytest.raises(ConfigError, match="cannot be made"):
        trainer.set_loss_fn(LossSpec("nope:loss"))
    with pytest.raises(Refused, match="no loss"):
        TrainingWorker(attrs.evolve(worker_config(model), loss=None)).train_batch(batch)
    assert trainer.infer_batch(batch) is not None


# ---------------------------------------------------------------------------------------------- actor, rollout, ref


def whole_config(model: str, role: str = "actor_rollout_ref", **rollout: Any) -> ActorRolloutRefConfig:
    return ActorRolloutRefConfig(
        role=Role(role),
        actor=worker_config(model),
        ref=worker_config(model),
        rollout=RolloutWorkerConfig(engine={"model": model}, **rollout),
    )


@pytest.fixture
def whole(model: str) -> ActorRolloutRefWorker:
    worker = ActorRolloutRefWorker(whole_config(model, bucket_mb=0))
    worker.init_model()
    return worker


def prompts(num_prompts: int = 4) -> TensorDict:
    lengths = torch.arange(num_prompts) % 3 + 2
    ids = torch.randint(3, 64, (int(lengths.sum()),), generator=torch.Generator().manual_seed(1))
    return TensorDict({"prompt_ids": jagged_from(ids, lengths)}, batch_size=[num_prompts])


def log_prob_gap(worker: ActorRolloutRefWorker, samples: TensorDict, temperature: float = 1.0) -> float:
    """Largest difference between the rollout's and the trainer's log-probs of the sampled tokens."""
    scores = worker.compute_log_prob(samples, temperature)
    assert scores is not None
    mask = samples["response_mask"].values()
    gap = samples["rollout_log_probs"].values() - scores["old_log_probs"].values()
    return float(gap[mask].abs().max())


@contextmanager
def failing_bucket(rollout: Any, number: int) -> Iterator[None]:
    """The rollout's load_bucket raises at its number-th call."""
    load, calls = rollout.load_bucket, []

    def limited(bucket: Any) -> None:
        calls.append(bucket)
        if len(calls) == number:
            raise OSError("the link is down")
        load(bucket)

    rollout.load_bucket = limited
    try:
        yield
    finally:
        rollout.load_bucket = load


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_policy_and_rollout_agree_on_log_probs_before_and_after_an_update(
    whole: ActorRolloutRefWorker, temperature: float
) -> None:
    sampling = SamplingParams(num_samples=2, max_new_tokens=8, temperature=temperature, seed=1, ignore_eos=True)
    for _ in range(2):
        samples = whole.generate_sequences(prompts(), sampling)
        assert log_prob_gap(whole, samples, temperature) < 1e-4
        batch = samples.select("input_ids", "response_mask")
        scores = whole.compute_log_prob(batch, temperature)
        reference = whole.compute_ref_log_prob(batch, temperature)
        assert scores is not None
        assert reference is not None
        batch["old_log_probs"], batch["ref_log_probs"] = scores["old_log_probs"], reference["ref_log_probs"]
        batch["advantages"] = torch.nested.nested_tensor_from_jagged(
            torch.randn(len(batch["input_ids"].values())), batch["input_ids"].offsets()
        )
        whole.update_actor(batch, temperature=temperature)
        stale = whole.generate_sequences(prompts(), sampling, min_version=0)
        assert log_prob_gap(whole, stale, temperature) > 1e-4
        assert stale["weight_version"].tolist() == [whole.weight_version - 1] * 8
        with pytest.raises(Refused, match="too old"):  # the worker knows of its own policy's newer ones
            whole.generate_sequences(prompts(), sampling)
        assert whole.update_weights() == whole.weight_version
    fresh = whole.generate_sequences(prompts(), sampling, whole.weight_version)
    assert log_prob_gap(whole, fresh, temperature) < 1e-4


def test_rows_that_were_sampled_at_another_temperature_are_refused_before_anything_runs(
    whole: ActorRolloutRefWorker,
) -> None:
    sampling = SamplingParams(num_samples=2, max_new_tokens=8, temperature=0.7, seed=1)
    batch = whole.generate_sequences(prompts(), sampling)
    batch["old_log_probs"] = batch["advantages"] = batch["rollout_log_probs"]
    calls: list[Callable[[], Any]] = [
        lambda: whole.compute_log_prob(batch, 1.0),
        lambda: whole.compute_ref_log_prob(batch, 1.0),
        lambda: whole.update_actor(batch, temperature=1.0),
    ]
    for call in calls:
        with pytest.raises(Refused, match=r"another temperature[\s\S]*=1\.0[\s\S]*=0\.7"):
            call()
    assert whole.weight_version == 0
    assert whole.compute_log_prob(batch.exclude("rollout_temperature"), 1.0) is not None, "another one, on purpose"


def test_the_methods_that_say_that_they_only_read_write_to_nothing(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYMESH_CHECK_READS", "1")
    group: Any = LocalWorkerGroup(ActorRolloutRefWorker, whole_config(model))
    group.init_model()
    samples = group.generate_sequences(prompts(), SamplingParams(num_samples=2, max_new_tokens=8, seed=1))
    for batch in (samples, to_padded(samples)):
        batch["old_log_probs"] = group.compute_log_prob(batch, 1.0)["old_log_probs"]
        batch["ref_log_probs"] = group.compute_ref_log_prob(batch, 1.0)["ref_log_probs"]
        batch["advantages"] = batch["old_log_probs"] * 0 + 1
        assert group.update_actor(batch, 2, temperature=1.0)["loss"] != 0
    group.shutdown()


def test_greedy_rows_are_scored_at_temperature_1(whole: ActorRolloutRefWorker) -> None:
    batch = whole.generate_sequences(prompts(), SamplingParams(max_new_tokens=8, temperature=0.0))
    assert metadata(batch, "rollout_temperature") == 1.0
    assert log_prob_gap(whole, batch, 1.0) < 1e-4
    with pytest.raises(Refused, match="another temperature"):
        whole.compute_log_prob(batch, 0.7)
    with pytest.raises(Refused, match="above 0"):
        whole.compute_log_prob(batch.exclude("rollout_temperature"), 0.0)


def test_the_reference_keeps_its_weights_while_the_policy_learns(whole: ActorRolloutRefWorker) -> None:
    batch = training_batch()
    before = whole.compute_ref_log_prob(batch, 1.0)
    whole.update_actor(batch, temperature=1.0)
    after, policy = whole.compute_ref_log_prob(batch, 1.0), whole.compute_log_prob(batch, 1.0)
    assert before is not None
    assert after is not None
    assert policy is not None
    assert torch.equal(before["ref_log_probs"].values(), after["ref_log_probs"].values())
    assert not torch.allclose(policy["old_log_probs"].values(), after["ref_log_probs"].values(), atol=1e-4)


def test_an_update_that_fails_midway_leaves_no_valid_weights_until_the_next(whole: ActorRolloutRefWorker) -> None:
    sampling = SamplingParams(max_new_tokens=4, seed=1)
    whole.update_actor(training_batch(), temperature=1.0)
    with failing_bucket(whole.rollout, 3), pytest.raises(OSError, match="link"):
        whole.update_weights()
    assert whole.rollout is not None
    assert whole.rollout.weight_version is None
    with pytest.raises(Refused):
        whole.generate_sequences(prompts(), sampling)
    assert whole.update_weights() == 1
    assert log_prob_gap(whole, whole.generate_sequences(prompts(), sampling)) < 1e-4


def test_released_weights_come_back_with_the_next_update_and_not_before(model: str) -> None:
    worker = ActorRolloutRefWorker(whole_config(model, "actor_rollout", release_after_generate=True))
    worker.init_model()
    sampling = SamplingParams(max_new_tokens=4, seed=1)
    worker.generate_sequences(prompts(), sampling)
    with pytest.raises(Refused):
        worker.generate_sequences(prompts(), sampling)
    worker.update_weights()
    assert log_prob_gap(worker, worker.generate_sequences(prompts(), sampling)) < 1e-4


def test_prompts_without_an_id_are_numbered_by_the_drivers_rows(whole: ActorRolloutRefWorker) -> None:
    with placed(WorkerContext(), Shard((Block(((6, 8),)), Block(((10, 12),))))):
        samples = whole.generate_sequences(prompts(), SamplingParams(num_samples=2, max_new_tokens=2))
    assert samples["prompt_id"].tolist() == [6, 6, 7, 7, 10, 10, 11, 11]


@pytest.mark.parametrize("role", list(Role))
def test_a_role_has_its_parts_and_refuses_what_belongs_to_others(model: str, role: Role) -> None:
    worker = ActorRolloutRefWorker(whole_config(model, role))
    with pytest.raises(Refused, match=r"call init_model first|choose a role"):
        worker.compute_log_prob(training_batch(), 1.0)
    worker.init_model()
    assert sorted(worker.meshes) == sorted(role.parts)
    calls = {
        "actor": lambda: worker.compute_log_prob(training_batch(), 1.0),
        "ref": lambda: worker.compute_ref_log_prob(training_batch(), 1.0),
        "rollout": lambda: worker.generate_sequences(
            prompts(), SamplingParams(max_new_tokens=2, log_probs=LogProbKind.RAW)
        ),
    }
    for part, call in calls.items():
        if part in role.parts:
            assert call() is not None
        else:
            with pytest.raises(Refused, match=f"has no {part}"):
                call()


def test_what_was_left_to_the_device_is_told_by_part(model: str) -> None:
    config = whole_config(model, "actor_rollout_ref")
    with LocalWorkerGroup(RayClassWithInitArgs(ActorRolloutRefWorker, config)) as group:
        assert group.settled_options() == {}, "nothing is built"
        group.init_model()
        parts = group.settled_options()
        assert parts == {part: {"dtype": "float32"} for part in ("actor", "ref", "rollout")}
        assert (
            Workers.shared(group).settled_options() == "actor dtype=float32, ref dtype=float32, rollout dtype=float32"
        )


def test_a_role_without_the_config_of_its_parts_is_refused() -> None:
    with pytest.raises(ConfigError, match="actor, rollout"):
        ActorRolloutRefConfig(role=Role.ACTOR_ROLLOUT)
    with pytest.raises(ConfigError, match="did you mean 'actor_rollout'"):
        ActorRolloutRefConfig(role="actor_rolout")


def test_a_checkpoint_brings_back_policy_step_and_version(model: str, tmp_path: Path) -> None:
    first, second = (ActorRolloutRefWorker(whole_config(model, "actor")) for _ in range(2))
    for worker in (first, second):
        worker.init_model()
    with pytest.raises(Refused, match="already has its models"):
        first.init_model()
    first.update_actor(training_batch(), temperature=1.0)
    first.save_checkpoint(str(tmp_path / "step-1"), 1)
    assert second.load_checkpoint(str(tmp_path / "step-1")) == 1 == second.weight_version
    assert second.load_checkpoint(str(tmp_path / "step-1")) == 1
    assert second.weight_version == 2  # never one version for two sets of weights
    scores = [worker.compute_log_prob(training_batch(), 0.5) for worker in (first, second)]
    assert scores[0] is not None
    assert scores[1] is not None
    assert torch.equal(scores[0]["old_log_probs"].values(), scores[1]["old_log_probs"].values())


# ---------------------------------------------------------------------------------------------- export


def test_the_trained_policy_is_written_as_a_directory_that_transformers_loads(model: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    worker = ActorRolloutRefWorker(whole_config(model, "actor"))
    worker.init_model()
    worker.update_actor(training_batch(), temperature=1.0)
    worker.export_model(str(tmp_path / "trained"))
    assert worker.actor is not None
    final = AutoModelForCausalLM.from_pretrained(tmp_path / "trained").state_dict()
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()
    for name, tensor in worker.actor.engine.export_weights():
        assert torch.equal(final[name], tensor)
    assert any(not torch.equal(final[name], before[name]) for name in before)


def test_a_large_model_is_cut_into_shards_with_an_index(model: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    weights = AutoModelForCausalLM.from_pretrained(model).state_dict()
    export_directory(iter(weights.items()), model, str(tmp_path / "out"), writes=True, shard_bytes=40_000)
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())


def test_a_model_that_cannot_be_written_is_refused_and_nothing_is_left(model: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match="cannot write the model"):
        export_directory(iter([("a", torch.ones(1))]), model, str(tmp_path / "file" / "out"), writes=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


class Forgetful:
    """A rollout that forgets a column of the contract."""

    def __init__(self, rollout: Any) -> None:
        self._rollout = rollout

    def generate(self, *args: Any, **kwargs: Any) -> TensorDict:
        answer: TensorDict = self._rollout.generate(*args, **kwargs).exclude("finish_reason")
        return answer


def test_a_rollout_that_forgets_a_column_of_the_contract_is_named(whole: ActorRolloutRefWorker) -> None:
    forgetful: Any = Forgetful(whole.rollout)
    whole.rollout = forgetful
    with pytest.raises(BadAnswer, match="'hf' answered without columns of the contract: finish_reason"):
        whole.generate_sequences(prompts(), SamplingParams(max_new_tokens=2))
