"""Where the Megatron engine puts itself on a world of ranks. Light: no torch and no megatron."""

from __future__ import annotations

from math import prod

import attrs

from core.errors import Refused
from core.manifest import Limits, ModelFacts, Plan
from core.mesh import MeshLayout
from manymesh_megatron.config import MegatronConfig
from manymesh_megatron.families import Architecture, read_architecture
from manymesh_megatron.rules import check

# megatron orders a gradient's all-reduce and the next product by one hardware queue. CUDA reads it when it starts.
ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
EXPERT = "expert"  # name of the layout that experts are sharded by
# An axis of `order` in the dense layout and in that of the experts, where context parallel ranks are data parallel.
_DENSE_AXES = {"tp": "tp", "cp": "cp", "dp": "dp", "pp": "pp"}
_EXPERT_AXES = {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}


@attrs.frozen
class MegatronPlan(Plan):
    """Plan, and what the engine chose for options left open: sentences for the operator."""

    notes: tuple[str, ...] = ()


def plan(config: MegatronConfig, world_size: int, model: ModelFacts | None = None) -> MegatronPlan:
    """Two layouts over the same ranks: one with axes pp, dp, cp, tp, and the view "expert" with pp, edp, ep, etp.

    Rows are dealt along dp. Ranks that differ only in tp, cp or pp share them, and of these the one in the last stage
    with tp 0 and cp 0 is collected.

    Raises:
        Refused: sizes or options that do not go with each other, the world or the model; see rules.py and families.py.
    """
    if world_size < 1:
        raise Refused("an engine needs at least one rank", have=world_size, want="a world size of 1 or more")
    architecture = read_architecture(model) if model is not None else None
    check(config, world_size, architecture, f"{model.path}/config.json" if model is not None else "")
    dense = _layout(config, world_size, _DENSE_AXES)
    expert = _layout(config, world_size, _EXPERT_AXES)
    _check_pipelines_agree(config, dense, expert)
    return MegatronPlan(
        dense,
        dense.route(("dp",), {"pp": -1}),
        _limits(config, architecture),
        {EXPERT: expert},
        _notes(config, architecture),
        environment=ENVIRONMENT,
    )


def _layout(config: MegatronConfig, world_size: int, axes: dict[str, str]) -> MeshLayout:
    """As megatron's RankGenerator: `order` from the innermost axis out; what it leaves out has one rank.

    Raises:
        Refused: `order` leaves out an axis of more ranks.
    """
    sizes = {
        "tp": config.tensor_parallel,
        "cp": config.context_parallel,
        "etp": config.expert_tensor_size,
        "ep": config.expert_parallel,
        "pp": config.pipeline_parallel,
    }
    order = [axes[axis] for axis in config.order.split("-") if axis in axes]
    rest = next(axis for axis in axes.values() if axis.endswith("dp"))
    sizes[rest] = world_size // prod(sizes[axis] for axis in axes.values() if axis != rest)
    for token, axis in axes.items():
        if axis not in order and sizes[axis] > 1:
            raise Refused(
                f"order leaves out the axis {token!r}, and there are {sizes[axis]} ranks along it",
                have=f"order={config.order!r}",
                want=f"an order with {token!r} in it",
                mend=f"set order={_pp_last(config.order, token)!r}",
            )
    outermost_first = [*(axis for axis in axes.values() if axis not in order), *reversed(order)]
    return MeshLayout.of(**{axis: sizes[axis] for axis in outermost_first})


def _check_pipelines_agree(config: MegatronConfig, dense: MeshLayout, expert: MeshLayout) -> None:
    """As megatron-core asserts: a rank's pipeline is the same for experts and the rest, and with another order than pp
    last, dp and edp are equal."""
    if config.pipeline_parallel == 1 or config.order.endswith("pp"):
        return
    if dense.size("dp") == expert.size("edp") and dense.groups("pp") == expert.groups("pp"):
        return
    raise Refused(
        "with this order the pipelines of experts are not those of the other layers",
        have=f"order={config.order!r}, dense {dense}, expert {expert}",
        want="an order that ends in 'pp', or expert_parallel and expert_tensor_parallel that leave edp as large as dp",
        mend=f"set order={_pp_last(config.order)!r}",
    )


def _pp_last(order: str, *added: str) -> str:
    return "-".join([*(axis for axis in (*order.split("-"), *added) if axis != "pp"), "pp"])


def _limits(config: MegatronConfig, model: Architecture | None) -> Limits:
    tp = config.tensor_parallel if config.sequence_parallel else 1
    cp = 2 * config.context_parallel if config.context_parallel > 1 else 1  # each rank has a piece of both ends
    value_head = model is not None and model.value_head
    outputs = {"values"} if value_head else {"log_probs", "entropy", "top_log_probs"}
    return Limits(
        micro_batch_multiple=config.pipeline_parallel if config.virtual_stages > 1 else 1,
        sequence_multiple=tp * cp,
        packed=config.packed,
        outputs=frozenset(outputs),
    )


def _notes(config: MegatronConfig, model: Architecture | None) -> tuple[str, ...]:
    experts = model.num_experts > 0 if model is not None else config.expert_parallel > 1
    if experts and config.expert_tensor_parallel is None and config.tensor_parallel > 1:
        return (
            f"expert_tensor_parallel is {config.expert_tensor_size}, as tensor_parallel; set it to 1 for whole experts",
        )
    return ()
