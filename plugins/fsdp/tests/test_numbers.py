"""However a step is run and whatever the family, steps are those of one process with a plain transformers model."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from fsdp_steps import build, infer, train
from transformers import AutoModelForCausalLM

from manymesh_fsdp.config import FsdpConfig
from sdk.reference import OPTIMIZER, PlainTrainer, make_batch, movement_error

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


@pytest.mark.parametrize("trap", [{"use_cache": True}, {"attention_mask": torch.ones(1, 40, dtype=torch.long)}])
def test_packed_rows_would_leak_with_a_cache_or_a_mask(qwen3, trap) -> None:
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


@pytest.mark.parametrize("world_size", [1, 2])
def test_bf16_compute_keeps_fp32_weights_and_follows_the_plain_loop_roughly(on, qwen3, plain, world_size) -> None:
    ranks = on(world_size, train, qwen3, BATCHES, 2, compute_dtype="bfloat16", reduce_dtype="float32")
    assert {each.dtype for each in ranks[0]["weights"].values()} == {torch.float32}
    assert sum(each["steps"][0][0] for each in ranks) == pytest.approx(plain["steps"][0][0], rel=0.1)
    assert 1e-4 < movement_error(ranks[0]["weights"], plain["weights"], plain["start"]) < 0.7


def test_a_reference_in_bf16_scores_as_the_policy_that_computes_in_bf16(on, qwen3) -> None:
    """What "auto" makes of the two on GPUs."""
    batch = BATCHES[0]
    policy, reference = (FsdpConfig(qwen3, trainable=trainable).on("cuda") for trainable in (True, False))
    assert reference.dtype == reference.compute_dtype == policy.compute_dtype == "bfloat16"
    scores = [
        infer(build(qwen3, trainable=config.trainable, dtype=config.dtype, compute_dtype="bfloat16"), batch)
        for config in (policy, reference)
    ]
    assert torch.equal(scores[0]["log_probs"], scores[1]["log_probs"])
