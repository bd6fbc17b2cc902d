"""Log-probabilities, losses, gradients and steps are those of one process with a plain transformers model."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from fsdp_steps import build, infer, train, weights
from transformers import AutoModelForCausalLM

from core.config import OptimizerConfig
from core.protocols import LossScale
from manymesh_fsdp.engine import FsdpEngine
from sdk.reference import BOTH, OPTIMIZER, PlainTrainer, PolicyLoss, make_batch, movement_error, scale_of

BATCHES = [make_batch(seed=0), make_batch(seed=1)]


@pytest.fixture(scope="session")
def plain(qwen3: str) -> dict[str, Any]:
    """The same two steps by the plain loop."""
    model = PlainTrainer(qwen3)
    start, outputs = model.weights(), model.outputs(BATCHES[0])
    steps = [model.step(batch) for batch in BATCHES]
    return {
        "start": start,
        "outputs": {name: value.detach() for name, value in outputs.items()},
        "steps": steps,
        "weights": model.weights(),
    }


def check_steps(ranks: list[dict[str, Any]], plain: dict[str, Any], tolerance: float = 1e-3) -> None:
    for number, (loss, norm) in enumerate(plain["steps"]):
        assert sum(each["steps"][number][0] for each in ranks) == pytest.approx(loss, rel=1e-4)
        for each in ranks:
            assert each["steps"][number][1:] == (pytest.approx(norm, rel=1e-4), False)
    for each in ranks:
        assert movement_error(each["weights"], plain["weights"], plain["start"]) < tolerance


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("num_micro", [1, 2, 4])
@pytest.mark.parametrize("world_size", [1, 2])
def test_steps_on_very_unequal_rows_equal_the_plain_loop(on, qwen3, plain, world_size, num_micro, packing) -> None:
    check_steps(on(world_size, train, qwen3, BATCHES, num_micro, packing=packing), plain)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_outputs_are_aligned_with_tokens_and_zero_elsewhere(on, qwen3, plain, packing) -> None:
    made = infer(build(qwen3, packing=packing), BATCHES[0])
    empty = ~BATCHES[0]["response_mask"]
    for name, want in plain["outputs"].items():
        assert made[name].dtype == torch.float32
        assert made[name][empty].eq(0).all()
        torch.testing.assert_close(made[name], want, atol=2e-5, rtol=1e-5)


def test_packed_rows_do_not_see_each_other(on, qwen3) -> None:
    batch, other = make_batch((20, 20)), make_batch((20, 20))
    other["input_ids"][0] = other["input_ids"][0].flip(0)
    engine = build(qwen3, packing=True)
    before, after = infer(engine, batch), infer(engine, other)
    torch.testing.assert_close(before["log_probs"][1], after["log_probs"][1], atol=2e-5, rtol=1e-5)
    assert (before["log_probs"][0] - after["log_probs"][0]).abs().max() > 0.1


@pytest.mark.parametrize("trap", [{"use_cache": True}, {"attention_mask": torch.ones(1, 40, dtype=torch.long)}])
def test_the_check_above_would_see_rows_that_leak(qwen3, trap) -> None:
    """What transformers does with position_ids alone where a cache or a mask comes with them."""
    batch = make_batch((20, 20))
    model = AutoModelForCausalLM.from_pretrained(qwen3)
    packed = {"input_ids": batch["input_ids"].reshape(1, 40), "position_ids": torch.arange(20).repeat(2)[None]}
    with torch.no_grad():
        apart = model(**packed, use_cache=False).logits
        leaking = model(**packed, **({"use_cache": False} | trap)).logits
    assert (apart - leaking)[0, :20].abs().max() < 1e-4
    assert (apart - leaking)[0, 20:].abs().max() > 0.1


@pytest.mark.parametrize(
    ("options", "same_as_plain"),
    [
        ({"gradient_checkpointing": True}, True),
        ({"reshard_after_forward": False}, True),
        ({"gradient_checkpointing": True, "packing": True, "attn_implementation": "eager"}, True),
        ({"optimizer": attrs.evolve(OPTIMIZER, max_grad_norm=1e-2)}, False),
    ],
    ids=["checkpointing", "no-reshard", "checkpointing-packed-eager", "hard-clipping"],
)
def test_how_a_step_is_run_does_not_change_it(on, qwen3, plain, options, same_as_plain) -> None:
    if not same_as_plain:
        model = PlainTrainer(qwen3, options["optimizer"])
        plain = plain | {"steps": [model.step(batch) for batch in BATCHES], "weights": model.weights()}
    check_steps(on(2, train, qwen3, BATCHES, 2, **options), plain)


@pytest.mark.parametrize("family", ["qwen3_moe", "llama", "qwen2"])
def test_other_families_step_as_the_plain_loop(on, model_dir, family) -> None:
    directory = model_dir(family, tie_word_embeddings=False)
    model = PlainTrainer(directory)
    start, steps = model.weights(), [model.step(batch) for batch in BATCHES]
    check_steps(on(2, train, directory, BATCHES, 2), {"start": start, "steps": steps, "weights": model.weights()})


def test_the_schedule_is_the_one_of_the_config(on, qwen3) -> None:
    config = OptimizerConfig(lr=1e-2, schedule="cosine", warmup_steps=2, total_steps=6, min_lr_ratio=0.1)
    engine = build(qwen3, optimizer=config)
    rates = [engine.lr_scheduler_step() for _ in range(6)]
    assert rates == pytest.approx([config.lr * config.lr_factor(number) for number in range(6)])
    model = PlainTrainer(qwen3, config)
    start, steps = model.weights(), [model.step(batch) for batch in BATCHES]
    check_steps(
        on(2, train, qwen3, BATCHES, optimizer=config), {"start": start, "steps": steps, "weights": model.weights()}
    )


def test_weight_decay_leaves_norms_alone(on, qwen3) -> None:
    """With no gradient to speak of, matrices shrink and norms stay."""

    def job(rank: int, world_size: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        engine = build(qwen3, optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.5))
        before, batch = weights(engine), make_batch()
        batch["advantages"].zero_()
        batch["row_weight"].zero_()
        engine.optimizer_zero_grad()
        rows = batch[rank::world_size].contiguous()
        engine.forward_backward([rows], PolicyLoss(), LossScale(1.0, 1.0))
        engine.optimizer_step()
        return before, weights(engine)

    before, after = on(2, job)[0]
    for name, tensor in before.items():
        want = tensor if tensor.ndim == 1 else tensor * (1 - 1e-2 * 0.5)
        torch.testing.assert_close(after[name], want, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("world_size", [1, 2])
def test_bf16_compute_keeps_fp32_weights_and_follows_the_plain_loop_roughly(on, qwen3, plain, world_size) -> None:
    ranks = on(world_size, train, qwen3, BATCHES, 2, compute_dtype="bfloat16", reduce_dtype="float32")
    assert {each.dtype for each in ranks[0]["weights"].values()} == {torch.float32}
    assert sum(each["steps"][0][0] for each in ranks) == pytest.approx(plain["steps"][0][0], rel=0.1)
    assert 1e-4 < movement_error(ranks[0]["weights"], plain["weights"], plain["start"]) < 0.7


def test_bf16_parameters_train(on, qwen3) -> None:
    made = on(2, train, qwen3, BATCHES, 2, dtype="bfloat16")[0]
    assert {each.dtype for each in made["weights"].values()} == {torch.bfloat16}
    assert all(norm > 0 and not skipped for _, norm, skipped in made["steps"])


def test_only_what_is_asked_for_is_given(on, qwen3) -> None:
    engine: FsdpEngine = build(qwen3)
    assert infer(engine, BATCHES[0], frozenset({"entropy"})).keys() == {"entropy"}
    with engine.train_mode():
        engine.optimizer_zero_grad()
        (result,) = engine.forward_backward(BATCHES[:1], PolicyLoss(), scale_of(BATCHES[0]), outputs=BOTH)
    assert result.outputs is None
