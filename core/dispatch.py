"""Registering methods, and the ready dispatch modes: how arguments are dealt to ranks and answers joined.

A dispatch mode is an object with two functions: `dispatch` makes one RankCall a rank, `collect` makes the driver's
result from the ranks' answers. `Dispatch` holds the ready ones, `on_mesh` makes one that routes by a mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack, get_args, overload

import attrs

from core._calls.call import Call as Call
from core._calls.call import Command as Command
from core._calls.call import DispatchMode as DispatchMode
from core._calls.call import Execute as Execute
from core._calls.call import MethodSpec, NumBlocks, RowsPerInput
from core._calls.call import PerRank as PerRank
from core._calls.call import RankCall as RankCall
from core._calls.call import Undeclared as Undeclared
from core._calls.deal import as_given, deal, each_its_own, not_from_here, to_all, to_rank_zero
from core._calls.join import Reducer, check_reducers, join, joined_and_own, list_by_rank, of_rank_zero, same_on_all
from core._calls.join import WeightedMean as WeightedMean
from core._calls.registered import SPEC
from core._calls.registered import method_specs as method_specs
from core._rows.shards import DealBy
from core._rows.shards import Uneven as Uneven
from core.errors import Refused

if TYPE_CHECKING:
    from core._run.typed import AnyFuture, AnyResult, JoinedAnswers, ListOfAnswers, ListOfOwnAnswers, OneAnswer

Decorator = TypeVar("Decorator")


class MethodOptions(TypedDict, total=False):
    """Options of `register`, for type checkers. Their defaults are MethodSpec's."""

    rows_per_input: RowsPerInput
    num_blocks: NumBlocks
    uneven: Uneven
    deal_by: DealBy
    reducers: Mapping[str, Reducer]
    timeout_s: float | None
    columns: Collection[str] | None
    reads_only: bool


class PlainOptions(MethodOptions, total=False):
    """Of a method that all ranks run, and whose result a plain call waits for."""

    execute_mode: Literal[Execute.ALL]
    blocking: Literal[True]


class AllOptions(MethodOptions, total=False):
    """Of any method."""

    execute_mode: Execute
    blocking: bool


@overload
def register(dispatch_mode: None = None, **options: Unpack[PlainOptions]) -> ListOfAnswers: ...
@overload
def register(dispatch_mode: DispatchMode[Undeclared], **options: Unpack[PlainOptions]) -> AnyResult: ...
@overload
def register(dispatch_mode: DispatchMode[Decorator], **options: Unpack[PlainOptions]) -> Decorator: ...
@overload
def register(
    dispatch_mode: DispatchMode[Any] | None = None,
    *,
    execute_mode: Literal[Execute.RANK_ZERO],
    blocking: Literal[True] = ...,
    **options: Unpack[MethodOptions],
) -> OneAnswer: ...
@overload
def register(dispatch_mode: str, **options: Unpack[AllOptions]) -> AnyResult: ...
@overload
def register(
    dispatch_mode: DispatchMode[Any] | None = None,
    *,
    execute_mode: Execute = ...,
    blocking: Literal[False],
    **options: Unpack[MethodOptions],
) -> AnyFuture: ...
def register(dispatch_mode: DispatchMode[Any] | str | None = None, **options: Unpack[AllOptions]) -> Any:
    """Make a worker's method callable on its group. Changes nothing but an attribute of the function.

    For type checkers the method has the mode's result where it is called by `group.workers`, and is what it was where a
    worker calls it. An override that is to be typed there is decorated again.

    Args:
        dispatch_mode: how arguments are dealt and answers joined; Dispatch.ONE_TO_ALL when not given. A name is that of
            a plugin's mode, looked up when the class is bound to a group.
        execute_mode: Execute.ALL (default): all ranks run it. Execute.RANK_ZERO: only rank 0, whose value is then the
            result.
        blocking: what a plain call does: wait for the result (True, the default), or give a Future.
            `group.method.later(...)` always gives one.
        rows_per_input: rows of an answered batch for each row of the given one: a number (1 when not given), the name
            of the argument that holds it, a function of the method's arguments, or None when it isn't fixed.
        num_blocks: the batch is this many blocks (mini-batches), and each is dealt over dp by itself, so that dp never
            changes which rows make a block: a number (1 when not given), the name of the argument that holds it, or a
            function.
        uneven: what to do with rows that don't divide: "error" (default), "pad" or "ragged"; see
            core._rows.shards.deal_rows.
        deal_by: "rows" (default): each dp rank gets the next run of rows. "tokens": of each block each dp rank gets as
            many rows, chosen so that all carry near-equal numbers of tokens. Rows with one `group_id` stay together
            either way, and count as one. Answers are in the driver's order.
        reducers: how the values of answered dicts are joined, by key; see core._calls.join.
        timeout_s: deadline of a call; the group's when not given.
        columns: of batches only these columns are sent, where they are there, and model inputs (`inputs/<name>`); all
            when not given.
        reads_only: the method writes to no tensor or array that it is given, so it gets no private copies of them;
            False when not given. MANYMESH_CHECK_READS=1 in the workers' environment proves it.

    Raises:
        Refused: no such reducer or policy, or the mode deals rows to all ranks but only rank 0 would run.
        TypeError: no such option.
    """
    mode = dispatch_mode or Dispatch.ONE_TO_ALL
    ready = isinstance(mode, str) and isinstance(getattr(Dispatch, mode, None), DispatchMode)
    if ready or not isinstance(mode, DispatchMode | str):
        want = f"Dispatch.{mode}, the object" if ready else "Dispatch.X, on_mesh(name), or the name of a plugin's mode"
        raise Refused("a ready dispatch mode is a DispatchMode", have=repr(mode), want=want)
    spec = MethodSpec(mode, **options)
    if spec.execute_mode is Execute.RANK_ZERO and isinstance(mode, DispatchMode) and (mode.mesh or mode.joins_rows):
        raise Refused(
            "a method that is dealt rows runs on all ranks",
            have=f"Execute.RANK_ZERO, mode {mode.name}",
            want="Execute.ALL",
            mend="use Dispatch.RANK_ZERO for what rank 0 does alone",
        )
    if spec.rows_per_input is None and (spec.num_blocks != 1 or spec.uneven == "pad" or spec.deal_by == "tokens"):
        raise Refused(
            "rows can be put back in order, or filler cut off, only where their number is known",
            have=f"rows_per_input None, num_blocks {spec.num_blocks}, uneven {spec.uneven!r}, deal_by {spec.deal_by!r}",
            mend="declare rows_per_input, a number or a function of the arguments",
        )
    if spec.uneven not in get_args(Uneven):
        raise Refused(f"unknown policy {spec.uneven!r} for uneven rows", want=get_args(Uneven))
    if spec.deal_by not in get_args(DealBy):
        raise Refused(f"rows are not dealt by {spec.deal_by!r}", want=get_args(DealBy))
    check_reducers(spec.reducers)

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        setattr(function, SPEC, spec)
        return function

    return mark


# ------------------------------------------------------------------------------------------------ ready modes


def _by_dp(name: str, mesh: str | None = None) -> DispatchMode[JoinedAnswers]:
    return DispatchMode(
        name, deal, join, answering=lambda call: call.route.collected, mesh=mesh, joins_rows=True, on_tables=True
    )


def on_mesh(name: str) -> DispatchMode[JoinedAnswers]:
    """Split batches by the mesh's dp ranks.

    Ranks of one dp rank get the same shard. The answers of the collected ranks are joined by dp rank, so that the
    result has the input's rows in the input's order. What is no batch is broadcast.
    """
    return _by_dp(f"on_mesh({name!r})", name)


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> DispatchMode[JoinedAnswers]:
    """verl's name of `on_mesh`."""
    return on_mesh(mesh_name)


class Dispatch:
    """The ready dispatch modes."""

    RANK_ZERO: DispatchMode[OneAnswer] = DispatchMode("RANK_ZERO", to_rank_zero, of_rank_zero, on_tables=True)
    """Runs on rank 0 alone; its value."""

    ONE_TO_ALL: DispatchMode[ListOfAnswers] = DispatchMode("ONE_TO_ALL", to_all, list_by_rank, on_tables=True)
    """The same arguments to every rank; a list by rank."""

    SAME_ON_ALL: DispatchMode[OneAnswer] = DispatchMode("SAME_ON_ALL", to_all, same_on_all, on_tables=True)
    """The same arguments to every rank; the one value that they all answer."""

    ALL_TO_ALL: DispatchMode[ListOfOwnAnswers] = DispatchMode("ALL_TO_ALL", as_given, list_by_rank, on_tables=True)
    """Arguments as given: a PerRank gives each rank its own, everything else is the same for all. A list by rank."""

    DP_COMPUTE: DispatchMode[ListOfOwnAnswers] = DispatchMode("DP_COMPUTE", each_its_own, list_by_rank, on_tables=True)
    """Every argument is a PerRank. A list by rank."""

    DP_COMPUTE_PROTO = _by_dp("DP_COMPUTE_PROTO")
    """Batches are split over all ranks; one batch."""

    DP_COMPUTE_PROTO_WITH_FUNC = _by_dp("DP_COMPUTE_PROTO_WITH_FUNC")
    """Batches are split over all ranks, a function goes to every one; one batch."""

    DP_COMPUTE_METRIC: DispatchMode[Any] = attrs.evolve(_by_dp("DP_COMPUTE_METRIC"), collect=joined_and_own)
    """Batches are split over all ranks; (answers joined, a list of every rank's own)."""

    DIRECT_ROLLOUT_METHOD: DispatchMode = DispatchMode("DIRECT_ROLLOUT_METHOD", not_from_here, list_by_rank)
    """Bound so that a call is refused: requests go to the rollout's server, not through the driver."""
