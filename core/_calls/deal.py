"""Dealing a call's arguments to ranks: one walk over them."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from typing import Any

from core._calls.call import Call, PerRank, RankCall
from core._rows.shards import Shard, are_in_order, deal_rows
from core._rows.table import Deferred, WholeTable
from core._rows.wire import table_of
from core.columns import INPUTS
from core.errors import Refused

KEPT = ("row_weight", "group_id")  # sent whatever columns a method reads


def _is_sent(name: str, columns: Collection[str]) -> bool:
    """Model inputs are always sent: without them the model would read something else, and nobody would be told."""
    return name in columns or name in KEPT or name.startswith(INPUTS)


def arguments_of(call: Call, *, tables: bool = True) -> RankCall:
    """The call's arguments, in which futures have become their values and batches tables. Raises what a future raises.

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

    return RankCall(call.arguments.args, call.arguments.kwargs).map(value_of)


def deal(call: Call) -> Sequence[RankCall]:
    """Split batches by the route's dp ranks; what is no batch goes to every rank as it is, a PerRank to each its own.

    Notes the shards in the call, for `join`.

    Raises:
        Refused: batches of different length, rows that don't divide, rows without tokens that are dealt by tokens, a
            PerRank of another length.
    """
    arguments = arguments_of(call)
    tables = [value for value in arguments.values() if isinstance(value, WholeTable)]
    if not tables:
        return _own_values(call, [arguments] * call.world_size)
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

    def part_of(shard: Shard) -> RankCall:
        def cut(value: Any) -> Any:
            return value.shard(shard, with_weights=with_weights) if isinstance(value, WholeTable) else value

        return arguments.map(cut, shard)

    parts = [part_of(shard) for shard in call.shards]
    return _own_values(call, [parts[dp] for dp in route.dp_ranks])


def _own_values(call: Call, calls: Sequence[RankCall]) -> Sequence[RankCall]:
    """Of each PerRank the rank's own value; where there is none, ranks go on sharing a RankCall."""
    if not _differs(calls[0]):
        return calls

    def own(rank: int) -> RankCall:
        return calls[rank].map(
            lambda value: value.of(rank, call.world_size, call.where) if isinstance(value, PerRank) else value
        )

    return [own(rank) for rank in range(call.world_size)]


def _differs(arguments: RankCall) -> bool:
    return any(isinstance(value, PerRank) for value in arguments.values())


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


def as_given(call: Call) -> Sequence[RankCall]:
    """A PerRank gives each rank its own value, everything else is the same for all."""
    return _own_values(call, [arguments_of(call)] * call.world_size)


def to_all(call: Call) -> Sequence[RankCall]:
    """The same arguments to every rank."""
    arguments = arguments_of(call)
    if _differs(arguments):
        raise Refused(
            "a PerRank argument cannot be the same on every rank",
            where=call.where,
            mend="register the method with Dispatch.ALL_TO_ALL",
        )
    return [arguments] * call.world_size


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
