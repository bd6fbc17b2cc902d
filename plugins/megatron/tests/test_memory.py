"""The memory estimate against what each rank's tensors of real steps take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron_steps import engine_of

from core.loss import LossScale
from core.manifest import ModelFacts
from core.memory import Load, Memory, Phase
from manymesh.parts.decoder_shape import DecoderShape
from manymesh_megatron.config import MegatronConfig
from manymesh_megatron.memory import Share, in_flight, layer_numbers, memory
from manymesh_megatron.offload import gradient_tensors, parameter_tensors, state_tensors
from manymesh_megatron.plan import plan
from sdk.peak_memory import peak_memory
from sdk.reference import PolicyLoss, make_batch

ROWS, TOKENS, NUM_MICRO = 4, 128, 4
BOUND = 0.1  # of what is measured
SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_layers": 8,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 192}


def measured(rank: int, world_size: int, model: str, **options: Any) -> dict[str, int]:
    """Peak bytes of the second step, and what is held between steps."""
    with engine_of(model, **options) as engine:
        batch = make_batch((TOKENS,) * ROWS, seed=engine.mesh.dp_rank)
        scale = LossScale(num_tokens=ROWS * TOKENS, num_rows=ROWS)

        def train() -> None:
            with engine.train_mode():
                engine.optimizer_zero_grad()
                engine.forward_backward([batch] * NUM_MICRO, PolicyLoss(), scale)
                engine.optimizer_step()

        train()
        state = engine._ready()
        assert state.optimizer is not None
        tensors = [*parameter_tensors(state.models), *gradient_tensors(state.chunks), *state_tensors(state.optimizer)]
        return {
            "parameters": sum(each.numel() for chunk in state.models for each in chunk.parameters()),
            str(Phase.TRAIN): peak_memory(train, *tensors),
            str(Phase.IDLE): peak_memory(lambda: torch.zeros(1), *tensors),
        }


@pytest.mark.parametrize(
    ("world_size", "family", "options"),
    [
        (2, "qwen3", {"pipeline_parallel": 2}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (1, "qwen3", {}),
                (1, "qwen3", {"dtype": "bfloat16", "recompute": "full"}),
                (2, "qwen3", {"tensor_parallel": 2, "sequence_parallel": True, "dtype": "bfloat16"}),
                (2, "qwen3_moe", {"expert_parallel": 2}),
                (4, "qwen3", {"pipeline_parallel": 2, "virtual_pipeline": 2}),
                (4, "llama", {"tensor_parallel": 2, "distributed_optimizer": False}),
            )
        ),
    ],
    ids=str,
)
def test_the_estimate_is_near_what_tensors_take_on_every_rank(on, model_dir, world_size, family, options) -> None:
    model = model_dir(family, **SHAPE, **(EXPERTS if family == "qwen3_moe" else {}))
    config, facts = MegatronConfig(model, **options), ModelFacts.read(model)
    for rank, have in enumerate(on(world_size, measured, model, **options)):
        load = Load(device="cpu", rank=rank, micro_batch_tokens=ROWS * TOKENS, num_micro_batches=NUM_MICRO)
        want = {each.phase: each for each in memory(config, world_size, facts, load)}
        assert parameters(config, facts, world_size, rank) == have["parameters"]
        for phase in (Phase.IDLE, Phase.TRAIN):
            assert want[phase].total == pytest.approx(have[phase], rel=BOUND), (phase, want[phase])


def parameters(config: MegatronConfig, facts: ModelFacts, world_size: int, rank: int) -> int:
    stage = plan(config, world_size, facts).layout.coordinates(rank)["pp"]
    share = Share.of(config, DecoderShape.of(facts), stage)
    return share.dense + share.experts


def test_stages_together_have_the_model_and_a_second_table_where_it_is_tied(model_dir) -> None:
    for tied in (False, True):
        facts = ModelFacts.read(model_dir("qwen3", **SHAPE, tie_word_embeddings=tied))
        shape = DecoderShape.of(facts)
        for sizes in ({}, {"pipeline_parallel": 4}, {"pipeline_parallel": 2, "virtual_pipeline": 2}):
            config = MegatronConfig("x", **sizes)
            total = sum(Share.of(config, shape, stage).dense for stage in range(config.pipeline_parallel))
            copies = shape.embedding if tied and config.pipeline_parallel > 1 else 0
            assert total == shape.num_parameters + copies


@pytest.mark.parametrize(
    ("num_layers", "pp", "vpp", "first", "last"),
    [(8, 4, None, None, None), (8, 2, 2, None, None), (61, 8, None, 5, None), (94, 8, None, 11, 11), (12, 3, 2, 2, 6)],
)
def test_stages_have_the_layers_that_megatron_gives_them(num_layers, pp, vpp, first, last) -> None:
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config = MegatronConfig(
        "m", pipeline_parallel=pp, virtual_pipeline=vpp, first_stage_layers=first, last_stage_layers=last
    )
    upstream = TransformerConfig(
        num_layers=num_layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        pipeline_dtype=torch.float32,
    )
    for stage in range(pp):
        want = []
        for turn in range(vpp) if vpp else [None]:
            start = get_transformer_layer_offset(upstream, turn, stage)
            want += range(start, start + get_num_layers_to_build(upstream, turn, stage))
        assert layer_numbers(config, num_layers, stage) == want


@pytest.mark.parametrize(
    ("options", "num_micro", "by_stage"),
    [
        ({}, 8, [1]),
        ({"pipeline_parallel": 4}, 8, [4, 3, 2, 1]),
        ({"pipeline_parallel": 4}, 2, [2, 2, 2, 1]),
        ({"pipeline_parallel": 2, "virtual_pipeline": 2}, 4, [2.5, 1.5]),
    ],
)
def test_the_first_stage_holds_most_micro_batches(options, num_micro, by_stage) -> None:
    config = MegatronConfig("x", **options)
    assert [in_flight(config, stage, num_micro) for stage in range(config.pipeline_parallel)] == by_stage


def phases(model: str, **options: Any) -> dict[Phase, Memory]:
    facts = ModelFacts.read(model)
    return {each.phase: each for each in memory(MegatronConfig(model, **options), 8, facts, Load())}


def test_masters_are_in_fp32_where_the_model_is_not_and_shared_over_data_parallel_ranks(model_dir) -> None:
    model = model_dir("qwen3", **SHAPE)
    num = DecoderShape.of(ModelFacts.read(model)).num_parameters
    idle = phases(model)[Phase.IDLE]  # on GPUs auto is bf16
    assert (idle.parameters, idle.gradients) == (2 * num, 4 * num)
    assert idle.optimizer == pytest.approx(12 * num / 8, rel=1e-5)
    assert phases(model, distributed_optimizer=False)[Phase.IDLE].optimizer == 12 * num
    assert phases(model, dtype="float32", layer_spec="local")[Phase.IDLE].optimizer == pytest.approx(num, rel=1e-5)


def test_gradients_come_back_for_training_alone_and_are_never_on_the_host(model_dir) -> None:
    model = model_dir("qwen3", **SHAPE)
    stays, goes = phases(model), phases(model, offload_parameters=True, offload_optimizer=True)
    assert goes[Phase.IDLE].total == 0
    assert goes[Phase.IDLE].host == stays[Phase.IDLE].total - stays[Phase.IDLE].gradients
    assert goes[Phase.EVAL].gradients == goes[Phase.EXPORT].gradients == 0
    assert goes[Phase.TRAIN].gradients == stays[Phase.EVAL].gradients > 0
