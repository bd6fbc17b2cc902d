"""Known layouts and limits, and every refusal with the values that would be legal."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import EngineConfig, structure
from core.errors import ConfigError, Refused
from core.manifest import Limits, ModelFacts
from core.mesh import MeshLayout
from manymesh_megatron.config import MegatronConfig
from manymesh_megatron.plan import MegatronPlan, plan
from manymesh_megatron.rules import RULES

SHAPE = {
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
}
OUTPUTS = frozenset({"log_probs", "entropy", "top_log_probs"})
DENSE = ModelFacts("/models/dense", "qwen3", SHAPE)
MOE = ModelFacts("/models/moe", "qwen3_moe", {**SHAPE, "num_experts": 6, "moe_intermediate_size": 24})


def planned(world_size: int, model: ModelFacts | None = None, /, **options: Any) -> MegatronPlan:
    return plan(MegatronConfig("/models/any", **options), world_size, model)


def test_16_ranks_tp2_pp2_have_the_known_groups_and_route() -> None:
    layout_plan = planned(16, tensor_parallel=2, pipeline_parallel=2)
    dense = layout_plan.layout
    assert dense == MeshLayout.of(pp=2, dp=4, cp=1, tp=2)
    assert dense.groups("tp")[:2] == ((0, 1), (2, 3))
    assert dense.groups("dp") == ((0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15))
    assert dense.groups("pp")[0] == (0, 8)
    assert dense.groups("pp", "tp")[0] == (0, 1, 8, 9)
    assert layout_plan.route.dp_ranks == (0, 0, 1, 1, 2, 2, 3, 3) * 2
    assert sorted(layout_plan.route.collected) == [8, 10, 12, 14]


def test_context_parallel_ranks_share_rows_and_the_first_of_them_is_collected() -> None:
    layout_plan = planned(16, tensor_parallel=2, pipeline_parallel=2, context_parallel=2)
    assert layout_plan.layout.group_of(0, "cp") == (0, 2)
    assert layout_plan.layout.group_of(0, "dp") == (0, 4)
    assert layout_plan.route.dp_ranks == (0, 0, 0, 0, 1, 1, 1, 1) * 2
    assert sorted(layout_plan.route.collected) == [8, 12]


@pytest.mark.parametrize(
    ("expert_tensor", "expert"),
    [(None, MeshLayout.of(pp=1, edp=2, ep=4, etp=2)), (1, MeshLayout.of(pp=1, edp=4, ep=4, etp=1))],
)
def test_16_ranks_tp2_ep4_route_by_the_dense_layout_with_dp_8(expert_tensor: int | None, expert: MeshLayout) -> None:
    layout_plan = planned(16, tensor_parallel=2, expert_parallel=4, expert_tensor_parallel=expert_tensor)
    assert (layout_plan.layout, layout_plan.views) == (MeshLayout.of(pp=1, dp=8, cp=1, tp=2), {"expert": expert})
    assert layout_plan.route.dp_size == 8


def test_the_expert_tensor_size_that_was_left_open_is_told() -> None:
    options = {"tensor_parallel": 2, "expert_parallel": 2, "sequence_parallel": True}
    (note,) = planned(8, MOE, **options).notes
    assert "expert_tensor_parallel is 2" in note
    assert planned(8, MOE, **options, expert_tensor_parallel=1).notes == ()
    assert planned(8, DENSE, tensor_parallel=2).notes == ()


def test_limits_follow_what_cuts_the_tokens_and_the_micro_batches() -> None:
    assert planned(8, tensor_parallel=2, pipeline_parallel=2).limits == Limits(outputs=OUTPUTS)
    assert planned(8, tensor_parallel=4, sequence_parallel=True).limits.sequence_multiple == 4
    assert planned(8, context_parallel=2).limits.sequence_multiple == 4
    both = {"tensor_parallel": 4, "sequence_parallel": True, "context_parallel": 2}
    assert planned(8, **both).limits.sequence_multiple == 16
    assert planned(8, pipeline_parallel=4, virtual_pipeline=2).limits.micro_batch_multiple == 4


@pytest.fixture(params=[True, False], ids=["with TransformerEngine", "without TransformerEngine"])
def transformer_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the package can be found."""
    found = object() if request.param else None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: {"transformer_engine": found}[name])
    return bool(request.param)


def test_rows_are_packed_where_asked_or_where_the_layers_come_to_transformer_engines(transformer_engine: bool) -> None:
    assert planned(8, packing=True).limits.packed
    assert not planned(8).limits.packed
    on_gpu = MegatronConfig("m").on("cuda")
    assert on_gpu.layer_spec == ("transformer_engine" if transformer_engine else "local")
    assert MegatronConfig("m").on("cpu").layer_spec == MegatronConfig("m", layer_spec="local").on("cuda").layer_spec
    assert plan(on_gpu, 8).limits.packed is transformer_engine
    for options in ({"context_parallel": 2}, {"moe_dispatcher": "allgather"}, {"packing": False}):
        assert not plan(MegatronConfig("m", **options).on("cuda"), 8, MOE).limits.packed


def test_tensor_parallel_ranks_share_the_tokens_on_gpus() -> None:
    def settled(device: str, **options: Any) -> bool | None:
        return MegatronConfig("m", **options).on(device).sequence_parallel

    assert settled("cuda", tensor_parallel=2)
    assert settled("cuda") is settled("cpu", tensor_parallel=2) is False
    assert settled("cuda", tensor_parallel=2, sequence_parallel=False) is False
    assert settled("cpu", tensor_parallel=2, sequence_parallel=True)
    planned(8, MOE, tensor_parallel=2)  # left to the device
    assert plan(MegatronConfig("m", tensor_parallel=4).on("cuda"), 8, DENSE).limits.sequence_multiple == 4


@pytest.mark.parametrize(
    ("num_layers", "pp", "ends", "stages"),
    [
        (61, 8, (5, None), [5, 8, 8, 8, 8, 8, 8, 8]),
        (94, 8, (11, 11), [11, 12, 12, 12, 12, 12, 12, 11]),
        (61, 16, (None, 1), [4] * 15 + [1]),
        (3, 2, (2, None), [2, 1]),
        (3, 2, (1, 2), [1, 2]),
        (3, 2, (2, 2), None),
        (8, 8, (8, None), None),  # nothing is left for the others
        (61, 8, (None, None), None),
        (61, 8, (6, None), None),
    ],
)
def test_first_and_last_stages_take_numbers_of_layers_that_do_not_divide(num_layers, pp, ends, stages) -> None:
    options = {"pipeline_parallel": pp, "first_stage_layers": ends[0], "last_stage_layers": ends[1]}
    assert MegatronConfig("m", **options).stage_layers(num_layers) == stages
    if stages:
        planned(pp, changed(DENSE, num_hidden_layers=num_layers), **options)
    else:
        with pytest.raises(Refused, match="dealt to pipeline stages"):
            planned(pp, changed(DENSE, num_hidden_layers=num_layers), **options)


def test_processes_start_with_one_queue_to_the_gpu() -> None:
    assert planned(8).environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def test_a_value_model_gives_values() -> None:
    head = {"architectures": ["Qwen3ForTokenClassification"], "id2label": {"0": "LABEL_0"}}
    assert planned(1, attrs.evolve(DENSE, config={**SHAPE, **head})).limits.outputs == {"values"}
    assert planned(1, DENSE).limits.outputs == OUTPUTS


def changed(model: ModelFacts, **config: Any) -> ModelFacts:
    return attrs.evolve(model, config={**model.config, **config})


@attrs.frozen
class Case:
    """A refusal: the legal values, the mend and the fact that it tells, for a world, a model and options."""

    want: str
    mend: str
    fact: str
    world_size: int
    model: ModelFacts | None
    options: dict[str, Any]

    def refusal(self) -> Refused:
        with pytest.raises(Refused) as raised:
            planned(self.world_size, self.model, **self.options)
        return raised.value


def case(want: str, mend: str, fact: str, world_size: int, model: ModelFacts | None, **options: Any) -> Case:
    return Case(want, mend, fact, world_size, model, options)


THREE_KV = changed(DENSE, num_attention_heads=12, num_key_value_heads=3)
NARROW = changed(DENSE, intermediate_size=100)
AS_TP = "expert_tensor_parallel=2 (as tensor_parallel)"
CASES = [
    case("one of [1, 2, 3, 6]", "set tensor_parallel=3", "6 ranks", 6, None, tensor_parallel=4),
    case("one of [1, 2]", "set tensor_parallel=2", "6 ranks", 6, DENSE, tensor_parallel=4),
    case("that divides the world", "change more than one", "16 ranks", 16, None, tensor_parallel=3, context_parallel=5),
    case("one of [1, 2, 4]", "set expert_parallel=2", AS_TP, 8, None, expert_parallel=3, tensor_parallel=2),
    case(" or tensor_parallel one of [1, 2, 3, 6]", "set expert", "", 12, None, tensor_parallel=4, expert_parallel=2),
    case("pipeline_parallel one of [2, 4, 8]", "set virtual_pipeline=None", "8 ranks", 8, None, virtual_pipeline=2),
    case("None", "set overlap_p2p", "", 8, None, overlap_p2p=False, pipeline_parallel=2, virtual_pipeline=2),
    case("without virtual_pipeline", "set overlap_p2p=None", "", 8, None, overlap_p2p=True, pipeline_parallel=2),
    case("one of [2, 4, 8]", "set sequence_parallel=False", "tensor_parallel=1", 8, None, sequence_parallel=True),
    case("['auto', 'bfloat16', 'float32']", "set dtype=auto", "", 8, None, dtype="float16"),
    case(
        "dtype one of ['auto', 'bfloat16'] or layer_spec one of ['auto', 'local']",
        "set dtype=auto",
        "layer_spec=transformer_engine",
        8,
        None,
        dtype="float32",
        layer_spec="transformer_engine",
    ),
    case("pipeline_parallel one of [2, 4, 8]", "set first_stage_layers=None", "", 8, None, first_stage_layers=2),
    case("context_parallel 1", "set packing=False", "context_parallel=2", 8, None, packing=True, context_parallel=2),
    case("one of [1, 2]", "set pipeline_parallel=2", "num_hidden_layers=8", 6, DENSE, pipeline_parallel=3),
    case("[None, 2, 4]", "set virtual_pipeline=2", "layers=8", 8, DENSE, virtual_pipeline=3, pipeline_parallel=2),
    case("one of [1, 2]", "set tensor_parallel=2", "num_attention_heads=8", 6, DENSE, tensor_parallel=3),
    case("[1, 3, 6, 12]", "set tensor_parallel=1", "num_key_value_heads=3", 12, THREE_KV, tensor_parallel=2),
    case("one of [1, 2, 4]", "set tensor_parallel=4", "intermediate_size=100", 8, NARROW, tensor_parallel=8),
    case("expert_parallel 1", "set expert_parallel=1", "num_experts=0", 8, DENSE, expert_parallel=2),
    case("tensor_parallel 1", "set expert_tensor_parallel=1", "num_experts=0", 8, DENSE, expert_tensor_parallel=2),
    case("one of [1, 2]", "set expert_parallel=2", "num_experts=6", 8, MOE, expert_parallel=4),
    case(
        "[1, 2, 4, 8]",
        "set expert_tensor_parallel=8",
        "intermediate_size=24",
        32,
        MOE,
        expert_tensor_parallel=16,
        expert_parallel=2,
    ),
    case(
        "True or tensor_parallel 1",
        "set sequence_parallel=True",
        "num_experts=6",
        8,
        MOE,
        tensor_parallel=2,
        sequence_parallel=False,
    ),
    case(
        "expert_tensor_parallel 2 or expert_parallel 2",
        "set expert_tensor_parallel=2",
        "num_experts=6",
        8,
        MOE,
        expert_tensor_parallel=1,
        tensor_parallel=2,
        sequence_parallel=True,
    ),
    case(
        "alltoall", "set moe_dispatcher=alltoall", "experts=6", 8, MOE, moe_dispatcher="allgather", pipeline_parallel=2
    ),
    case(
        "packing False", "set moe_dispatcher=alltoall", "packing=True", 8, MOE, moe_dispatcher="allgather", packing=True
    ),
    case("an order with 'dp'", "set order='tp-dp-pp'", "", 8, None, order="tp-pp"),
    case(
        "ends in 'pp'",
        "set order='tp-dp-cp-pp'",
        "edp=4",
        8,
        None,
        order="tp-pp-dp-cp",
        pipeline_parallel=2,
        context_parallel=2,
    ),
    case("1 or more", "", "0", 0, None),
]


@pytest.mark.parametrize("each", CASES, ids=lambda each: f"{each.world_size} ranks {each.options}")
def test_a_refusal_tells_what_is_had_what_is_legal_and_the_mend(each: Case) -> None:
    refusal = each.refusal()
    have = str(refusal.have).replace("'", "")
    for name, value in list(each.options.items())[:1]:
        assert f"{name}={value}" in have
    assert each.fact in have
    assert each.want in str(refusal.want)
    assert refusal.mend.startswith(each.mend)


def test_every_rule_is_among_the_refusals_tested() -> None:
    assert {rule.message for rule in RULES} <= {each.refusal().message for each in CASES}


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel": 4, "sequence_parallel": True},  # more ranks than key-value heads
        {"tensor_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline": 2, "overlap_p2p": True},
        {"expert_tensor_parallel": 1, "tensor_parallel": 2},
        {"tensor_parallel": 2, "order": "tp-dp"},
        {"pipeline_parallel": 4, "first_stage_layers": 1, "last_stage_layers": 3},
        {"layer_spec": "transformer_engine", "dtype": "bfloat16"},
        {"layer_spec": "local", "dtype": "float32"},
    ],
)
def test_what_megatron_can_do_is_not_refused(options: dict[str, Any]) -> None:
    planned(8, DENSE, **options)


orders = st.permutations(["tp", "cp", "ep", "dp", "pp"])
size = st.sampled_from([1, 2, 3])


@settings(max_examples=50, deadline=None)
@given(orders, size, size, size, size, size, size)
def test_rows_and_groups_are_sound_for_all_legal_sizes(
    order: list[str], tp: int, pp: int, cp: int, ep: int, etp: int, spare: int
) -> None:
    if pp > 1:
        order = [*(axis for axis in order if axis != "pp"), "pp"]
    layout_plan = planned(
        pp * math.lcm(tp * cp, ep * etp) * spare,
        tensor_parallel=tp,
        pipeline_parallel=pp,
        context_parallel=cp,
        expert_parallel=ep,
        expert_tensor_parallel=etp,
        order="-".join(order),
    )
    layout_plan.route.check("train")
    for layout in (layout_plan.layout, *layout_plan.views.values()):
        for axis in layout.axes:
            ranks = [rank for group in layout.groups(axis) for rank in group]
            assert sorted(ranks) == list(range(len(layout_plan.route.dp_ranks)))
    dense = layout_plan.layout
    for rank, dp in enumerate(layout_plan.route.dp_ranks):
        at = dense.coordinates(rank)
        assert at.pop("dp") == dp
        assert (rank in layout_plan.route.collected) == (at == {"pp": pp - 1, "cp": 0, "tp": 0})


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 24), size, size, size, size, st.sampled_from([None, 1, 2, 3]), st.sampled_from([None, DENSE, MOE])
)
def test_a_mend_mends(
    world_size: int, tp: int, pp: int, cp: int, ep: int, etp: int | None, model: ModelFacts | None
) -> None:
    """Following mends one after another never comes back to the same complaint."""
    config = MegatronConfig(
        "/models/any",
        tensor_parallel=tp,
        pipeline_parallel=pp,
        context_parallel=cp,
        expert_parallel=ep,
        expert_tensor_parallel=etp,
    )
    names: list[str] = []
    while refusal := refusal_of(config, world_size, model):
        assert refusal.message not in names
        names.append(refusal.message)
        match = re.fullmatch(r"set (\w+)=(\w+)", refusal.mend)
        if match is None:
            assert refusal.mend.startswith("change more than one of")
            break
        name, value = match.groups()
        legal = {"True": True, "False": False}.get(value, value)
        config = attrs.evolve(config, **{name: int(legal) if value.isdigit() else legal})


def refusal_of(config: MegatronConfig, world_size: int, model: ModelFacts | None) -> Refused | None:
    try:
        plan(config, world_size, model)
    except Refused as refused:
        return refused
    return None


@pytest.mark.parametrize(
    ("options", "names", "mend"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel is at least 1", ""),
        ({"virtual_pipeline": 1}, "virtual_pipeline", "leave out virtual_pipeline"),
        ({"order": "tp-dp-up"}, "no axis 'up'", ""),
        ({"order": "tp-dp-tp"}, "an axis twice", ""),
        ({"recompute": "some"}, "config.recompute", ""),
        ({"tensor_paralel": 2}, "tensor_paralel", "'tensor_parallel'"),
        ({"overlap_param_gather": True}, "overlap_grad_reduce", "set both"),
        ({"transformer": {"context_parallel_size": 2}}, "the option context_parallel", "leave out transformer.context"),
        ({"transformer": {"num_layers": 2}}, "the model's config.json", "leave out transformer.num_layers"),
    ],
)
def test_an_illegal_option_is_a_config_error_that_names_it(options: dict[str, Any], names: str, mend: str) -> None:
    with pytest.raises(ConfigError) as raised:
        structure(MegatronConfig, {"model": "/models/any", **options})
    assert names in raised.value.message
    assert mend in raised.value.mend


def test_every_option_is_in_the_readme() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    names = set(re.findall(r"^\| `(\w+)`", readme, re.MULTILINE))
    assert names == {each.name for each in attrs.fields(MegatronConfig)} - {
        each.name for each in attrs.fields(EngineConfig)
    }


@pytest.mark.parametrize("trainable", [True, False])
def test_auto_is_bf16_on_gpus_where_the_optimizer_has_fp32_copies(trainable: bool) -> None:
    config = MegatronConfig("m", trainable=trainable, layer_spec="local")
    assert [config.on(device).dtype for device in ("cpu", "cuda")] == ["float32", "bfloat16"]
    assert MegatronConfig("m", dtype="float32").on("cuda").dtype == "float32"
    plan(config, 2)


def test_listing_and_planning_import_neither_torch_nor_megatron() -> None:
    modules = ", ".join(
        f"manymesh_megatron.{name}" for name in ("manifest", "config", "families", "rules", "plan", "memory")
    )
    code = f"""
import sys, {modules}
from core.manifest import ModelFacts
config = manymesh_megatron.config.MegatronConfig("m", tensor_parallel=2)
manymesh_megatron.plan.plan(config, 4, ModelFacts("m", "qwen3", {{}}))
sys.exit(sorted({{"torch", "megatron", "transformers"}} & set(sys.modules)) or 0)
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
