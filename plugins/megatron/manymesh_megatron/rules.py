"""Which sizes and options go together, for a world and a model. Each rule mirrors what megatron-core needs.

A rule that fails is told with the values that would be legal: those of each option it is about with which that rule and
every other rule about the option hold, all else as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs

from core.errors import Refused
from manymesh_megatron.config import MegatronConfig
from manymesh_megatron.families import Architecture


@attrs.frozen
class Rule:
    """`holds` is asked with the config, the world size and the architecture; `facts` are what it reads of the latter,
    and a rule with facts is for models that are known."""

    message: str
    options: tuple[str, ...]
    want: str
    holds: Callable[[MegatronConfig, int, Any], bool]
    facts: tuple[str, ...] = ()

    def is_about(self, option: str, config: MegatronConfig) -> bool:
        follows = option == "tensor_parallel" and config.expert_tensor_parallel is None
        return option in self.options or (follows and "expert_tensor_parallel" in self.options)


def check(config: MegatronConfig, world_size: int, model: Architecture | None, where: str = "") -> None:
    """Raises Refused for the first rule that fails."""
    rules = [rule for rule in RULES if model is not None or not rule.facts]
    for rule in rules:
        if not rule.holds(config, world_size, model):
            raise _refusal(rule, rules, config, world_size, model, where)


def _refusal(
    rule: Rule, rules: list[Rule], config: MegatronConfig, world_size: int, model: Architecture | None, where: str
) -> Refused:
    legal: dict[str, list[Any]] = {}
    options = [*rule.options]
    if rule.is_about("tensor_parallel", config) and "tensor_parallel" not in options:
        options.append("tensor_parallel")
    for option in options:
        about = [each for each in rules if each.is_about(option, config)]
        candidates = ((value, attrs.evolve(config, **{option: value})) for value in _values(option, world_size, model))
        values = [value for value, other in candidates if all(each.holds(other, world_size, model) for each in about)]
        if values:
            legal[option] = values
    have = [_format_option(option, config) for option in options]
    have += [f"{fact}={getattr(model, fact)}" for fact in rule.facts]
    have += [] if rule.facts or options[0] in _CHOICES else [f"{world_size} ranks"]
    want = [f"{option} {_one_of(values)}" for option, values in legal.items()]
    mends = (f"set {option}={_nearest(getattr(config, option), values)}" for option, values in legal.items())
    return Refused(
        rule.message,
        have=", ".join(have),
        want=rule.want + (": " + " or ".join(want) if want else ""),
        where=where if rule.facts else "",
        mend=next(mends, f"change more than one of {', '.join(options)}"),
    )


def _values(option: str, world_size: int, model: Architecture | None) -> Iterable[Any]:
    """What to try for an option."""
    if option in _CHOICES:
        return _CHOICES[option]
    if option in ("first_stage_layers", "last_stage_layers"):
        return (None, *range(1, model.num_hidden_layers if model else 1))
    if option == "virtual_pipeline":
        return (None, *range(2, model.num_hidden_layers + 1 if model else 2))
    return range(1, world_size + 1)


_CHOICES: dict[str, tuple[Any, ...]] = {
    "sequence_parallel": (False, True),
    "overlap_p2p": (None,),
    "dtype": ("auto", "bfloat16", "float32"),
    "layer_spec": ("auto", "local"),
    "packing": (False,),
    "moe_dispatcher": ("alltoall", "allgather", "flex"),
}


def _format_option(option: str, config: MegatronConfig) -> str:
    if option == "expert_tensor_parallel" and config.expert_tensor_parallel is None:
        return f"{option}={config.expert_tensor_size} (as tensor_parallel)"
    return f"{option}={getattr(config, option)}"


def _one_of(values: list[Any]) -> str:
    return str(values[0]) if len(values) == 1 else f"one of {values}"


def _nearest(value: Any, legal: list[Any]) -> Any:
    """The largest legal size below what was asked, else the smallest."""
    if isinstance(value, bool) or not isinstance(value, int):
        return legal[0]
    return max((each for each in legal if each is not None and each <= value), default=legal[0])


RULES = (
    Rule(
        "tensor, pipeline and context parallel sizes do not divide the world",
        ("tensor_parallel", "pipeline_parallel", "context_parallel"),
        "a product that divides the world size",
        lambda c, world, _: world % (c.tensor_parallel * c.pipeline_parallel * c.context_parallel) == 0,
    ),
    Rule(
        "expert, expert tensor and pipeline parallel sizes do not divide the world",
        ("expert_parallel", "expert_tensor_parallel", "pipeline_parallel"),
        "a product that divides the world size",
        lambda c, world, _: world % (c.expert_parallel * c.expert_tensor_size * c.pipeline_parallel) == 0,
    ),
    Rule(
        "virtual stages need a pipeline of at least two",
        ("virtual_pipeline", "pipeline_parallel"),
        "one stage a rank, or more ranks in the pipeline",
        lambda c, *_: c.virtual_pipeline is None or c.pipeline_parallel > 1,
    ),
    Rule(
        "without overlap_p2p megatron-core's virtual stages give wrong gradients, and say nothing",
        ("overlap_p2p", "virtual_pipeline"),
        "virtual stages that overlap their sends",
        lambda c, *_: c.virtual_pipeline is None or c.overlap_p2p is not False,
    ),
    Rule(
        "only virtual stages can overlap their sends",
        ("overlap_p2p",),
        "no overlap without virtual_pipeline",
        lambda c, *_: c.virtual_pipeline is not None or not c.overlap_p2p,
    ),
    Rule(
        "sequence parallel shares the tokens out among tensor parallel ranks, and there is one",
        ("sequence_parallel", "tensor_parallel"),
        "tensor_parallel above 1",
        lambda c, *_: not c.sequence_parallel or c.tensor_parallel > 1,
    ),
    Rule(
        "sizes of the first and the last pipeline stage need a pipeline of at least two",
        ("first_stage_layers", "last_stage_layers", "pipeline_parallel"),
        "no such sizes, or more ranks in the pipeline",
        lambda c, *_: c.pipeline_parallel > 1 or (c.first_stage_layers, c.last_stage_layers) == (None, None),
    ),
    Rule(
        "TransformerEngine's fast attention takes 16 bits alone; in float32 it holds tokens x tokens",
        ("dtype", "layer_spec"),
        "16 bits, or megatron's own layers",
        lambda c, *_: (c.dtype, c.layer_spec) != ("float32", "transformer_engine"),
    ),
    Rule(
        "the engine does not scale the loss, which float16 needs",
        ("dtype",),
        "a dtype with the range of float32",
        lambda c, *_: c.dtype != "float16",
    ),
    Rule(
        "rows packed into one cannot be cut for context parallel ranks",
        ("packing", "context_parallel"),
        "padded rows, or one context parallel rank",
        lambda c, *_: not c.packed or c.context_parallel == 1,
    ),
    Rule(
        "layers cannot be dealt to pipeline stages evenly",
        ("pipeline_parallel", "virtual_pipeline", "first_stage_layers", "last_stage_layers"),
        "a number of stages that divides the layers, those of a first and a last stage of other sizes left out",
        lambda c, _, model: c.stage_layers(model.num_hidden_layers) is not None,
        ("num_hidden_layers",),
    ),
    Rule(
        "attention heads cannot be dealt to tensor parallel ranks evenly",
        ("tensor_parallel",),
        "a divisor of the heads",
        lambda c, _, model: model.num_attention_heads % c.tensor_parallel == 0,
        ("num_attention_heads",),
    ),
    Rule(
        "key-value heads cannot be dealt to tensor parallel ranks evenly, nor ranks to them",
        ("tensor_parallel",),
        "a divisor of the key-value heads, or a multiple that divides the rows of q, k and v together",
        lambda c, _, model: _kv_fits(c.tensor_parallel, model),
        ("num_attention_heads", "num_key_value_heads", "head_dim"),
    ),
    Rule(
        "the MLP's width cannot be cut by tensor parallel ranks evenly",
        ("tensor_parallel",),
        "a divisor of the width",
        # Without a dense layer nothing has this width.
        lambda c, _, model: (
            (model.moe_layers and all(model.moe_layers)) or model.intermediate_size % c.tensor_parallel == 0
        ),
        ("intermediate_size",),
    ),
    Rule(
        "the model has no experts to be dealt to ranks",
        ("expert_parallel",),
        "1 for a dense model",
        lambda c, _, model: model.num_experts > 0 or c.expert_parallel == 1,
        ("num_experts",),
    ),
    Rule(
        "the model has no experts to be cut",
        ("expert_tensor_parallel",),
        "1 or nothing for a dense model",
        lambda c, _, model: model.num_experts > 0 or c.expert_tensor_parallel in (None, 1),
        ("num_experts",),
    ),
    Rule(
        "experts cannot be dealt to expert parallel ranks evenly",
        ("expert_parallel",),
        "a divisor of the experts",
        lambda c, _, model: model.num_experts % c.expert_parallel == 0,
        ("num_experts",),
    ),
    Rule(
        "an expert's width cannot be cut by expert tensor parallel ranks evenly",
        ("expert_tensor_parallel",),
        "a divisor of the width",
        lambda c, _, model: not model.num_experts or model.moe_intermediate_size % c.expert_tensor_size == 0,
        ("moe_intermediate_size",),
    ),
    Rule(
        "megatron-core trains experts under tensor parallel ranks only with sequence parallel",
        ("sequence_parallel", "tensor_parallel"),
        "sequence parallel, or one tensor parallel rank",
        lambda c, _, model: not model.num_experts or c.tensor_parallel == 1 or c.sequence_parallel is not False,
        ("num_experts",),
    ),
    Rule(
        "whole experts on tensor parallel ranks need expert parallel ranks: else megatron-core leaves out a sum over "
        "their gradients, and says nothing",
        ("expert_tensor_parallel", "expert_parallel"),
        "expert_tensor_parallel as tensor_parallel, or experts dealt to ranks",
        lambda c, _, model: not model.num_experts or c.expert_parallel > 1 or c.expert_tensor_size == c.tensor_parallel,
        ("num_experts",),
    ),
    Rule(
        "the allgather dispatcher needs micro-batches of one shape, and pipeline stages exchange any",
        ("moe_dispatcher", "pipeline_parallel"),
        "the other dispatcher, or no pipeline",
        lambda c, _, model: not model.num_experts or c.moe_dispatcher != "allgather" or c.pipeline_parallel == 1,
        ("num_experts",),
    ),
    Rule(
        "the allgather dispatcher needs micro-batches of one shape, and packed ones differ",
        ("moe_dispatcher", "packing"),
        "the other dispatcher, or padded rows",
        lambda c, _, model: not model.num_experts or c.moe_dispatcher != "allgather" or not c.packed,
        ("num_experts",),
    ),
)


def _kv_fits(tensor_parallel: int, model: Architecture) -> bool:
    # With more ranks than key-value heads, megatron-core gathers q, k and v and each rank picks its head; the weight is
    # then cut by rows, wherever heads begin.
    rows = (model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim
    whole = tensor_parallel % model.num_key_value_heads == 0 and rows % tensor_parallel == 0
    return model.num_key_value_heads % tensor_parallel == 0 or whole
