"""Dealing a call's arguments to ranks: one walk over them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs

from core._calls.call import Call, PerRank, RankCall
from core._rows.shards import are_in_order, deal_rows
from core._rows.table import Deferred, WholeTable
from core._rows.wire import table_of
from core.columns import INPUTS
from core.errors import Refused

KEPT = ("row_weight", "group_id")  # sent whatever columns a method reads


def _is_sent(name: str, columns: Collection[str]) -> bool:
    """Model inputs are always sent: without them the model would read something else, and nobody would be told."""
    return name in columns or name in KEPT or name.startswith(INPUTS)


@attrs.frozen
class Arguments:
    """A call's arguments, of which futures have become their values and batches tables."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, call: Call, *, tables: bool = True) -> Arguments:
        """The arguments, with what they come to. Raises what a future among them raises.

        Args:
            tables: False for a mode that deals by itself: batches are TensorDicts.
        """
        columns = call.spec.columns

        def value_of(value: Any) -> Any:
            if isinstance(value, Deferred):
                value = value.awaited(call.where)
            table = table_of(value)
            if table is None:
                return value
            if not tables:
                return table.batch() if isinstance(value, WholeTable) else value
            return table if columns is None else table.only(lambda name: _is_sent(name, columns))

        arguments = call.arguments
        return cls(tuple(map(value_of, arguments.args)), {k: value_of(v) for k, v in arguments.kwargs.items()})

    def values(self) -> list[Any]:
        return [*self.args, *self.kwargs.values()]

    @property
    def tables(self) -> list[WholeTable]:
        return [value for value in self.values() if isinstance(value, WholeTable)]

    @property
    def differ(self) -> bool:
        """Whether some argument differs by rank."""
        return any(isinstance(value, PerRank) for value in self.values())

    def map(self, function: Callable[[Any], Any]) -> Arguments:
        return Arguments(tuple(map(function, self.args)), {name: function(v) for name, v in self.kwargs.items()})

    def by_rank(self, call: Call) -> list[Arguments]:
        """For each rank its own values; the same object for all where none differs."""
        if not self.differ:
            return [self] * call.world_size
        return [self.of_rank(rank, call) for rank in range(call.world_size)]

    def of_rank(self, rank: int, call: Call) -> Arguments:
        """The rank's own values."""
        return self.map(
            lambda value: value.of(rank, call.world_size, call.where) if isinstance(value, PerRank) else value
        )


def deal(call: Call) -> Sequence[RankCall]:
    """Split batches by the route's dp ranks; what is no batch goes to every rank as it is, a PerRank to each its own.

    Notes the shards in the call, for `join`.

    Raises:
        Refused: batches of different length, rows that don't divide, rows without tokens that are dealt by tokens, a
            PerRank of another length.
    """
    arguments = Arguments.of(call)
    tables = arguments.tables
    if not tables:
        return _same_shard(call, arguments)
    if len({len(table) for table in tables}) > 1:
        raise _differ_in_length(call)
    spec, route = call.spec, call.route
    call.rows_per_input = call.setting(spec.rows_per_input)
    call.own_weights = any("row_weight" in table.names for table in tables)
    num_blocks = call.setting(spec.num_blocks)
    tokens = _row_tokens(call, tables) if spec.deal_by == "tokens" else None
    groups = next((ids for table in tables if (ids := table.row_groups()) is not None), None)
    call.shards = deal_rows(
        len(tables[0]), route.dp_size, num_blocks, call.where, spec.uneven, tokens=tokens, groups=groups
    )
    if call.rows_per_input is None and groups is not None and not are_in_order(call.shards):
        raise Refused(
            "rows of groups can be put back in order only where their number is known",
            where=call.where,
            mend="declare rows_per_input, a number or a function of the arguments, or give rows of a group in a row",
        )
    with_weights = call.has_filler
    by_dp = []
    for shard in call.shards:

        def part_of(value: Any, shard: Any = shard) -> Any:
            return value.shard(shard, with_weights=with_weights) if isinstance(value, WholeTable) else value

        part = arguments.map(part_of)
        by_dp.append((part, RankCall(part.args, part.kwargs, shard)))
    if not arguments.differ:
        return [by_dp[dp][1] for dp in route.dp_ranks]
    own = [by_dp[dp][0].of_rank(rank, call) for rank, dp in enumerate(route.dp_ranks)]
    return [RankCall(each.args, each.kwargs, call.shards[dp]) for each, dp in zip(own, route.dp_ranks, strict=True)]


def _row_tokens(call: Call, tables: Sequence[WholeTable]) -> Sequence[int]:
    for table in tables:
        if (tokens := table.row_tokens()) is not None:
            return tokens
    raise Refused(
        "rows are dealt by tokens, and no column tells how many they have",
        have=tables[0].names,
        want="input_ids or another jagged column, or attention_mask",
        where=call.where,
        mend='register the method with deal_by="rows"',
    )


def _same_shard(call: Call, arguments: Arguments) -> list[RankCall]:
    calls: dict[int, RankCall] = {}
    by_rank = arguments.by_rank(call)
    return [calls.setdefault(id(own), RankCall(own.args, own.kwargs)) for own in by_rank]


def as_given(call: Call) -> Sequence[RankCall]:
    """A PerRank gives each rank its own value, everything else is the same for all."""
    return _same_shard(call, Arguments.of(call))


def to_all(call: Call) -> Sequence[RankCall]:
    """The same arguments to every rank."""
    arguments = Arguments.of(call)
    if arguments.differ:
        raise Refused(
            "a PerRank argument cannot be the same on every rank",
            where=call.where,
            mend="register the method with Dispatch.ALL_TO_ALL",
        )
    return _same_shard(call, arguments)


def to_rank_zero(call: Call) -> Sequence[RankCall | None]:
    """The arguments to rank 0 alone."""
    return [to_all(call)[0], *[None] * (call.world_size - 1)]


def each_its_own(call: Call) -> Sequence[RankCall]:
    """Every argument is a PerRank."""
    others = [name for name, value in call.arguments.arguments.items() if not isinstance(value, PerRank | type(None))]
    if others:
        raise Refused(
            "this method takes a value for each rank",
            have=f"arguments {others} that are no PerRank",
            want=f"PerRank([...]) of {call.world_size} values",
            where=call.where,
            mend="wrap them, or register the method with Dispatch.ALL_TO_ALL",
        )
    return as_given(call)


def not_from_here(call: Call) -> Sequence[RankCall]:
    """Refuse: requests go to the rollout's server, not through the driver."""
    raise Refused(
        f"{call.method!r} is not called by the driver",
        where=call.where,
        mend="it is served by the rollout itself; ask the rollout's server, or use a generate method of the group",
    )


def list_meant_per_rank(call: Call) -> str:
    """A hint for a call that failed: which list may have been meant as a PerRank; "" where none."""
    lists = [name for name, value in call.arguments.arguments.items() if isinstance(value, list | tuple)]
    names = [name for name in lists if len(call.arguments.arguments[name]) == call.world_size > 1]
    if not names or call.spec.mode.joins_rows:
        return ""
    return f"every rank got the whole of {', '.join(names)}; wrap it in PerRank(...) to give each rank its own element"


def _differ_in_length(call: Call) -> Refused:
    lengths: dict[str, int] = {}
    for name, value in call.arguments.arguments.items():
        kind = call.arguments.signature.parameters[name].kind
        values = {name: value}
        if kind is inspect.Parameter.VAR_POSITIONAL:
            values = {f"{name}[{i}]": item for i, item in enumerate(value)}
        elif kind is inspect.Parameter.VAR_KEYWORD:
            values = dict(value)
        for key, item in values.items():
            table = table_of(item.awaited(call.where) if isinstance(item, Deferred) else item)
            if table is not None:
                lengths[key] = len(table)
    return Refused(
        "the batches of one call differ in length",
        have=", ".join(f"{name}: {rows} rows" for name, rows in lengths.items()),
        want="as many rows in each",
        where=call.where,
    )
