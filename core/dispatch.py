"""Registering methods, and the ready dispatch modes: how arguments are dealt to ranks and answers joined.

A dispatch mode is an object with two functions: `dispatch` makes one RankCall a rank, `collect` makes the driver's
result from the ranks' answers. `Dispatch` holds the ready ones, `on_mesh` makes one that routes by a mesh.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar, get_args

import attrs

from core._calls.calls import Call as Call
from core._calls.calls import DispatchMode as DispatchMode
from core._calls.calls import Execute as Execute
from core._calls.calls import MethodSpec, NumBlocks, RowsPerInput
from core._calls.calls import PerRank as PerRank
from core._calls.calls import RankCall as RankCall
from core._calls.join import Reducer, check_reducers, is_remote, is_rows, join_answers
from core._calls.join import WeightedMean as WeightedMean
from core._rows.shards import Shard, cut, deal_rows, in_order
from core._rows.shards import Uneven as Uneven
from core.errors import Refused
from core.mesh import Route

F = TypeVar("F", bound=Callable[..., Any])
_SPEC = "__manymesh_spec__"


def register(
    dispatch_mode: DispatchMode | str | None = None,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    *,
    rows_per_input: RowsPerInput = 1,
    num_blocks: NumBlocks = 1,
    uneven: Uneven = "error",
    reducers: Mapping[str, Reducer] | None = None,
    timeout_s: float | None = None,
    columns: Collection[str] | None = None,
    reads_only: bool = False,
) -> Callable[[F], F]:
    """Make a worker's method callable on its group. Changes nothing but an attribute of the function.

    Args:
        dispatch_mode: how arguments are dealt and answers joined; Dispatch.ONE_TO_ALL when not given. A name is that of
            a plugin's mode, looked up when the class is bound to a group.
        execute_mode: whether all ranks run it or only rank 0, whose value is then the result.
        blocking: False gives a Future.
        rows_per_input: rows of an answered batch for each row of the given one: a number, a function of the method's
            arguments, or None when it isn't fixed.
        num_blocks: the batch is this many blocks (mini-batches), and each is dealt over dp by itself, so
            that dp never changes which rows make a block: a number, or a function of the method's arguments.
        uneven: what to do with rows that don't divide: "error", "pad" or "ragged"; see core._rows.shards.deal_rows.
        reducers: how the values of answered dicts are joined, by key; see core._calls.join.
        timeout_s: deadline of a call; the group's when not given.
        columns: of batches only these columns are sent, where they are there; all when not given.
        reads_only: the method writes to no tensor or array that it is given, so it gets no private copies of them.
            MANYMESH_CHECK_READS=1 in the workers' environment proves it.

    Raises:
        Refused: no such reducer or policy, or the mode deals rows to all ranks but only rank 0 would run.
    """
    mode = dispatch_mode or Dispatch.ONE_TO_ALL
    ready = isinstance(mode, str) and isinstance(getattr(Dispatch, mode, None), DispatchMode)
    if ready or not isinstance(mode, DispatchMode | str):
        want = f"Dispatch.{mode}, the object" if ready else "Dispatch.X, on_mesh(name), or the name of a plugin's mode"
        raise Refused("a ready dispatch mode is a DispatchMode", have=repr(mode), want=want)
    if isinstance(mode, DispatchMode) and mode.mesh is not None and execute_mode is Execute.RANK_ZERO:
        raise Refused(
            "a method that is dealt over a mesh runs on all its ranks",
            have="Execute.RANK_ZERO",
            want="Execute.ALL",
            mend="use Dispatch.RANK_ZERO for what rank 0 does alone",
        )
    if rows_per_input is None and (num_blocks != 1 or uneven == "pad"):
        raise Refused(
            "rows can be put back in order, or filler cut off, only where their number is known",
            have=f"rows_per_input None, num_blocks {num_blocks}, uneven {uneven!r}",
            mend="declare rows_per_input, a number or a function of the arguments",
        )
    if uneven not in get_args(Uneven):
        raise Refused(f"unknown policy {uneven!r} for uneven rows", want=get_args(Uneven))
    check_reducers(reducers or {})
    spec = MethodSpec(
        mode,
        execute_mode,
        blocking,
        rows_per_input,
        num_blocks,
        uneven,
        reducers or {},
        timeout_s,
        None if columns is None else frozenset(columns),
        reads_only,
    )

    def mark(function: F) -> F:
        setattr(function, _SPEC, spec)
        return function

    return mark


def method_specs(cls: type) -> dict[str, tuple[MethodSpec, Callable[..., Any]]]:
    """The registered methods of a class, with the function that will run.

    An override without the decorator keeps the spec of what it overrides. Nothing is evaluated: a property that raises
    does no harm.
    """
    found: dict[str, tuple[MethodSpec, Callable[..., Any]]] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            spec = getattr(getattr(value, "__func__", value), _SPEC, None)
            if spec is not None and (not inspect.isfunction(value) or inspect.iscoroutinefunction(value)):
                kind = "a coroutine" if inspect.isfunction(value) else f"a {type(value).__name__}"
                raise Refused(
                    f"{cls.__name__}.{name} cannot be registered", have=kind, want="an ordinary method of an instance"
                )
            if spec is None and name in found and inspect.isfunction(value):
                spec = found[name][0]
            if spec is not None:
                found[name] = spec, value
            else:
                found.pop(name, None)  # overridden by something that is no method
    return found


# ------------------------------------------------------------------------------------------------ arguments


def _for_rank(call: Call, rank: int, shared: RankCall) -> RankCall:
    """The rank's own values of PerRank arguments; the shared call where there are none."""
    values = [*shared.args, *shared.kwargs.values()]
    if not any(isinstance(value, PerRank) for value in values):
        return shared

    def mine(value: Any) -> Any:
        return value.of(rank, call.world_size, call.where) if isinstance(value, PerRank) else value

    return RankCall(
        tuple(map(mine, shared.args)), {key: mine(value) for key, value in shared.kwargs.items()}, shared.shard
    )


def _as_given(call: Call) -> Sequence[RankCall]:
    common = RankCall(call.arguments.args, call.arguments.kwargs)
    return [_for_rank(call, rank, common) for rank in range(call.world_size)]


def _to_all(call: Call) -> Sequence[RankCall]:
    if any(isinstance(value, PerRank) for value in (*call.arguments.args, *call.arguments.kwargs.values())):
        raise Refused(
            "a PerRank argument cannot be the same on every rank",
            where=call.where,
            mend="register the method with Dispatch.ALL_TO_ALL",
        )
    return _as_given(call)


def _by_rank(call: Call) -> Sequence[RankCall]:
    wrong = [name for name, value in call.arguments.arguments.items() if not isinstance(value, PerRank | type(None))]
    if wrong:
        raise Refused(
            "this method takes a value for each rank",
            have=f"arguments {wrong} that are no PerRank",
            want=f"PerRank([...]) of {call.world_size} values",
            where=call.where,
            mend="wrap them, or register the method with Dispatch.ALL_TO_ALL",
        )
    return _as_given(call)


def _to_rank_zero(call: Call) -> Sequence[RankCall | None]:
    return [_to_all(call)[0], *[None] * (call.world_size - 1)]


def _list_by_rank(call: Call, answers: Mapping[int, Any]) -> Any:
    if call.spec.execute_mode is Execute.RANK_ZERO:
        return answers[0]
    return [answers[rank] for rank in range(call.world_size)]


# ------------------------------------------------------------------------------------------------ rows


def _is_batch(value: Any) -> bool:
    """A TensorDict of columns, or one that lies elsewhere; asked without importing torch where nobody has."""
    if "tensordict" not in sys.modules:
        return False
    from core._rows.rows import is_batch

    return is_batch(value) or is_remote(value)


def _batch_rows(call: Call) -> int | None:
    """Rows of the call's batches, None when it has none."""
    sizes: dict[str, int] = {}
    for name, value in call.arguments.arguments.items():
        kind = call.arguments.signature.parameters[name].kind
        values = {name: value}
        if kind is inspect.Parameter.VAR_POSITIONAL:
            values = {f"{name}[{i}]": item for i, item in enumerate(value)}
        elif kind is inspect.Parameter.VAR_KEYWORD:
            values = dict(value)
        sizes |= {key: len(item) for key, item in values.items() if _is_batch(item)}
    if len(set(sizes.values())) > 1:
        raise Refused(
            "the batches of one call differ in length",
            have=", ".join(f"{name}: {rows} rows" for name, rows in sizes.items()),
            want="as many rows in each",
            where=call.where,
        )
    return next(iter(sizes.values()), None)


def _deal(call: Call, route: Route) -> Sequence[RankCall]:
    num_rows = _batch_rows(call)
    if num_rows is None:
        return _as_given(call)
    spec = call.spec
    call.per_input = call.setting(spec.rows_per_input)
    shards = deal_rows(num_rows, route.dp_size, call.setting(spec.num_blocks), call.where, spec.uneven)
    call.shards, filled = shards, _has_filler(shards)

    def apart(value: Any) -> Any:
        if not _is_batch(value):
            return value
        from core._rows.rows import Rows

        rows = value if is_remote(value) else Rows.of(value)
        wanted = spec.columns
        return rows if wanted is None else rows.only(lambda name: name in wanted or name == "row_weight")

    args = [apart(value) for value in call.arguments.args]
    kwargs = {key: apart(value) for key, value in call.arguments.kwargs.items()}

    def for_shard(shard: Shard) -> RankCall:
        def mine(value: Any) -> Any:
            return cut(value, shard, filled) if is_rows(value) or is_remote(value) else value

        return RankCall(tuple(map(mine, args)), {key: mine(value) for key, value in kwargs.items()}, shard)

    by_dp = [for_shard(shard) for shard in shards]
    return [_for_rank(call, rank, by_dp[dp]) for rank, dp in enumerate(route.dp_ranks)]


def _join(call: Call, route: Route, answers: Mapping[int, Any]) -> Any:
    by_dp = [answers[rank] for rank in route.collectors]
    where = f"the answer of {call.where}"
    shards, per_input = call.shards, call.per_input
    if shards is None or per_input is None:
        return _batches(join_answers(by_dp, where, route.collectors, None, call.spec.reducers), lambda rows: rows)
    num_rows = [per_input * sum(shard.sizes) for shard in shards]
    batches = [value for value in (*call.arguments.args, *call.arguments.kwargs.values()) if _is_batch(value)]
    # Weights that came with the filler go with it.
    ours = _has_filler(shards) and not any("row_weight" in batch.keys() for batch in batches)  # noqa: SIM118

    def restore(rows: Any) -> Any:
        rows = in_order(rows, shards, per_input)
        return rows.only(lambda name: name != "row_weight") if ours else rows

    return _batches(join_answers(by_dp, where, route.collectors, num_rows, call.spec.reducers), restore)


def _has_filler(shards: Sequence[Shard]) -> bool:
    return any(shard.has_filler for shard in shards)


def _batches(result: Any, restore: Callable[[Any], Any]) -> Any:
    """TensorDicts of the joined rows in a result."""
    if isinstance(result, tuple):
        return tuple(_batches(item, restore) for item in result)
    if isinstance(result, dict):
        return {key: _batches(item, restore) for key, item in result.items()}
    if isinstance(result, list):  # every rank's own: they were not joined, and not copied by that

        def own(rows: Any) -> Any:
            return type(rows).concat([rows])

        return [_batches(item, own) for item in result]
    return restore(result).batch() if is_rows(result) or is_remote(result) else result


# ------------------------------------------------------------------------------------------------ ready modes


def on_mesh(name: str) -> DispatchMode:
    """Split batches by the mesh's dp ranks.

    Ranks of one dp rank get the same shard. The answers of the collected ranks are joined by dp rank, so that the
    result has the input's rows in the input's order. What is no batch is broadcast.
    """
    return DispatchMode(
        f"on_mesh({name!r})",
        lambda call: _deal(call, call.route(name)),
        lambda call, answers: _join(call, call.route(name), answers),
        answering=lambda call: call.route(name).collected,
        mesh=name,
        joins_rows=True,
        remote=True,
    )


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> DispatchMode:
    """The long name of `on_mesh`, for those who come from verl."""
    return on_mesh(mesh_name)


def _over_world(call: Call) -> Route:
    return Route(tuple(range(call.world_size)), frozenset(range(call.world_size)))


def _proto(name: str) -> DispatchMode:
    return DispatchMode(
        name,
        lambda call: _deal(call, _over_world(call)),
        lambda call, answers: _join(call, _over_world(call), answers),
        joins_rows=True,
        remote=True,
    )


def _joined_and_own(call: Call, answers: Mapping[int, Any]) -> Any:
    own = _batches([answers[rank] for rank in range(call.world_size)], lambda rows: rows)
    return _join(call, _over_world(call), answers), own


def _not_from_here(call: Call) -> Sequence[RankCall]:
    raise Refused(
        f"{call.method!r} is not called by the driver",
        where=call.where,
        mend="it is served by the rollout itself; ask the rollout's server, or use a generate method of the group",
    )


class Dispatch:
    """The ready dispatch modes."""

    RANK_ZERO = DispatchMode("RANK_ZERO", _to_rank_zero, lambda call, answers: answers[0], remote=True)
    """Runs on rank 0 alone; its value."""

    ONE_TO_ALL = DispatchMode("ONE_TO_ALL", _to_all, _list_by_rank, remote=True)
    """The same arguments to every rank; a list by rank."""

    ALL_TO_ALL = DispatchMode("ALL_TO_ALL", _as_given, _list_by_rank, remote=True)
    """Arguments as given: a PerRank gives each rank its own, everything else is the same for all. A list by rank."""

    DP_COMPUTE = DispatchMode("DP_COMPUTE", _by_rank, _list_by_rank)
    """Every argument is a PerRank. A list by rank."""

    DP_COMPUTE_PROTO = _proto("DP_COMPUTE_PROTO")
    """Batches are split over all ranks; one batch."""

    DP_COMPUTE_PROTO_WITH_FUNC = _proto("DP_COMPUTE_PROTO_WITH_FUNC")
    """Batches are split over all ranks, a function goes to every one; one batch."""

    DP_COMPUTE_METRIC = attrs.evolve(_proto("DP_COMPUTE_METRIC"), collect=_joined_and_own)
    """Batches are split over all ranks; (answers joined, a list of every rank's own)."""

    DIRECT_ROLLOUT_METHOD = DispatchMode("DIRECT_ROLLOUT_METHOD", _not_from_here, _list_by_rank)
    """Bound so that a call is refused: requests go to the rollout's server, not through the driver."""
