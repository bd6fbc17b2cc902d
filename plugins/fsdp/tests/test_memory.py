"""The memory estimate against what tensors of real steps take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fsdp_steps import build

from core.loss import LossScale
from core.manifest import ModelFacts
from core.memory import Load, Memory, Phase
from manymesh_fsdp.config import FsdpConfig
from manymesh_fsdp.memory import memory
from sdk.peak_memory import peak_memory
from sdk.reference import PolicyLoss, make_batch

ROWS, TOKENS = 4, 128
BOUND = 0.1  # of what is measured
SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_layers": 6,
}


def measured(rank: int, world_size: int, model: str, num_micro: int, **options: Any) -> dict[str, int]:
    """Peak bytes of the second step and of a forward pass, and what is held between them."""
    engine = build(model, **options)
    batch = make_batch((TOKENS,) * ROWS, seed=rank)
    scale = LossScale(num_tokens=ROWS * TOKENS, num_rows=ROWS)

    def train() -> None:
        with engine.train_mode():
            engine.optimizer_zero_grad()
            engine.forward_backward([batch] * num_micro, PolicyLoss(), scale)
            engine.optimizer_step()

    def score() -> None:
        with engine.eval_mode():
            outputs = frozenset({"log_probs", "entropy"})
            engine.forward_backward([batch], None, scale, forward_only=True, outputs=outputs)

    train()
    state = engine._ready()
    holders = [state.model, *([state.optimizer._adamw] if state.optimizer else [])]
    peaks = {Phase.TRAIN: peak_memory(train, *holders), Phase.EVAL: peak_memory(score, *holders)}
    peaks[Phase.IDLE] = peak_memory(lambda: torch.zeros(1), *holders)
    engine.shutdown()
    return {str(phase): size for phase, size in peaks.items()}


@pytest.mark.parametrize(
    ("world_size", "num_micro", "options"),
    [
        (1, 2, {"compute_dtype": "bfloat16"}),
        *(
            pytest.param(*case, marks=pytest.mark.ci)
            for case in (
                (1, 1, {}),
                (1, 2, {"gradient_checkpointing": True}),
                (2, 1, {"gradient_checkpointing": True}),
                (2, 2, {"compute_dtype": "bfloat16", "gradient_checkpointing": True}),
                (2, 2, {"reshard_after_forward": False}),
            )
        ),
    ],
    ids=str,
)
def test_the_estimate_is_near_what_tensors_take(on, model_dir, world_size, num_micro, options) -> None:
    model = model_dir("qwen3", **SHAPE)
    have = on(world_size, measured, model, num_micro, **options)[0]
    load = Load(device="cpu", micro_batch_tokens=ROWS * TOKENS, num_micro_batches=num_micro)
    want = {each.phase: each for each in memory(FsdpConfig(model, **options), world_size, ModelFacts.read(model), load)}
    for phase, size in have.items():
        assert want[Phase(phase)].total == pytest.approx(size, rel=BOUND), (phase, want[Phase(phase)])


def by_phase(model: str, world_size: int, load: Load, **options: Any) -> dict[Phase, Memory]:
    facts = ModelFacts.read(model)
    return {each.phase: each for each in memory(FsdpConfig(model, **options), world_size, facts, load)}


def test_gradients_of_several_micro_batches_are_those_of_the_whole_model(model_dir) -> None:
    model = model_dir("qwen3", **SHAPE)
    one, two = (by_phase(model, 64, Load(num_micro_batches=number))[Phase.TRAIN] for number in (1, 2))
    whole = 64 * by_phase(model, 64, Load())[Phase.IDLE].parameters  # fp32, as the sums are
    assert two.gradients >= whole > one.gradients


def test_what_is_offloaded_is_on_the_host_between_the_modes(model_dir) -> None:
    model = model_dir("qwen3", **SHAPE)
    stays = by_phase(model, 8, Load())
    goes = by_phase(model, 8, Load(), offload_parameters=True, offload_optimizer=True)
    idle = stays[Phase.IDLE]
    assert (idle.host, goes[Phase.IDLE].total, goes[Phase.IDLE].host) == (0, 0, idle.total)
    assert goes[Phase.EVAL].optimizer == 0
    assert goes[Phase.TRAIN] == stays[Phase.TRAIN]
    on_cpu = by_phase(model, 8, Load(device="cpu"), offload_parameters=True)[Phase.IDLE]
    assert (on_cpu.host, on_cpu.total) == (0, idle.total)


def test_rank_0_reads_the_model_on_the_host(model_dir) -> None:
    model = model_dir("qwen3", **SHAPE)
    first, second = (by_phase(model, 2, Load(rank=rank))[Phase.LOAD] for rank in (0, 1))
    assert (first.total, second.host) == (second.total, 0)
    assert first.host == 2 * by_phase(model, 2, Load())[Phase.IDLE].parameters


def test_a_reference_has_neither_gradients_nor_optimizer(model_dir) -> None:
    phases = by_phase(model_dir("qwen3", **SHAPE), 2, Load(), trainable=False)
    assert Phase.TRAIN not in phases
    assert all(each.gradients == each.optimizer == 0 for each in phases.values())
    assert phases[Phase.IDLE].parameters > 0
