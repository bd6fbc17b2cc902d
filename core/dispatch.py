"""How a registered method's arguments are dealt to ranks, and its answers joined.

A dispatch mode is an object with two functions: `dispatch` makes one RankCall a rank, `collect` makes the driver's
result from the ranks' answers. `Dispatch` holds the ready ones, `on_mesh` makes one that routes by a mesh.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar

import attrs

from core.errors import Refused
from core.mesh import Route
from core.worker import Shard

F = TypeVar("F", bound=Callable[..., Any])
_SPEC = "__manymesh_spec__"


class Execute(Enum):
    """Which ranks run a method."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


@attrs.frozen(eq=False)
class RankCall:
    """What one rank is asked to run. Ranks that get the same arguments share one RankCall, and these travel once."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    shard: Shard | None = None


@attrs.frozen
class Call:
    """One call of a group's method, on the driver.

    Attributes:
        arguments: the bound signature, without self.
        route: gives the checked route of a mesh by name.
    """

    group: str
    world_size: int
    method: str
    spec: MethodSpec
    arguments: inspect.BoundArguments
    route: Callable[[str], Route]

    @property
    def where(self) -> str:
        mesh = f" on mesh {self.spec.mesh!r}" if self.spec.mesh else ""
        return f"method {self.method!r} of group {self.group!r}{mesh}"


@attrs.frozen
class DispatchMode:
    """A rule to deal and join.

    Attributes:
        dispatch: from a Call one RankCall for each rank, None for a rank that shall not run.
        collect: from a Call and the answers by rank the driver's result. Gets only the ranks in `answering`.
        answering: the ranks whose answers are sent to the driver; None for all.
        mesh: name of the mesh it routes by, if any.
        joins_rows: collect gets batches as core.rows.Rows, whose joining is cheap, and copies them.
    """

    name: str
    dispatch: Callable[[Call], Sequence[RankCall | None]]
    collect: Callable[[Call, Mapping[int, Any]], Any]
    answering: Callable[[Call], frozenset[int]] | None = None
    mesh: str | None = None
    joins_rows: bool = False


RowsPerInput = int | Callable[..., int] | None
NumBlocks = int | Callable[..., int]


@attrs.frozen
class MethodSpec:
    """What `register` hangs on a method."""

    dispatch_mode: DispatchMode
    execute_mode: Execute = Execute.ALL
    blocking: bool = True
    rows_per_input: RowsPerInput = 1
    num_blocks: NumBlocks = 1
    timeout_s: float | None = None

    @property
    def mesh(self) -> str | None:
        return self.dispatch_mode.mesh


def register(
    dispatch_mode: DispatchMode | None = None,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    *,
    rows_per_input: RowsPerInput = 1,
    num_blocks: NumBlocks = 1,
    timeout_s: float | None = None,
) -> Callable[[F], F]:
    """Make a worker's method callable on its group. Changes nothing but an attribute of the function.

    Args:
        dispatch_mode: how arguments are dealt and answers joined; Dispatch.ONE_TO_ALL when not given.
        execute_mode: whether all ranks run it or only rank 0, whose value is then the result.
        blocking: False gives a Future.
        rows_per_input: rows of an answered batch for each row of the given one: a number, a function of the method's
            arguments, or None when it isn't fixed.
        num_blocks: the batch is this many blocks (mini-batches) of equal size, and each is dealt over dp by itself, so
            that dp never changes which rows make a block: a number, or a function of the method's arguments.
        timeout_s: deadline of a call; the group's when not given.

    Raises:
        Refused: the mode deals rows to all ranks but only rank 0 would run.
    """
    mode = dispatch_mode or Dispatch.ONE_TO_ALL
    if not isinstance(mode, DispatchMode):
        raise Refused("a dispatch mode is a DispatchMode", have=repr(mode), want="Dispatch.X or on_mesh(name)")
    if mode.mesh is not None and execute_mode is Execute.RANK_ZERO:
        raise Refused(
            "a method that is dealt over a mesh runs on all its ranks",
            have="Execute.RANK_ZERO",
            want="Execute.ALL",
            mend="use Dispatch.RANK_ZERO for what rank 0 does alone",
        )
    spec = MethodSpec(mode, execute_mode, blocking, rows_per_input, num_blocks, timeout_s)

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
            spec = getattr(value, _SPEC, None) if inspect.isfunction(value) else None
            if spec is None and name in found and inspect.isfunction(value):
                spec = found[name][0]
            if spec is not None:
                found[name] = spec, value
            else:
                found.pop(name, None)  # overridden by something that is no method
    return found


# ------------------------------------------------------------------------------------------------ ready modes


def _common(call: Call) -> RankCall:
    return RankCall(call.arguments.args, call.arguments.kwargs)


def _to_all(call: Call) -> Sequence[RankCall]:
    return [_common(call)] * call.world_size


def _list_by_rank(call: Call, answers: Mapping[int, Any]) -> Any:
    if call.spec.execute_mode is Execute.RANK_ZERO:
        return answers[0]
    return [answers[rank] for rank in range(call.world_size)]


def _to_rank_zero(call: Call) -> Sequence[RankCall | None]:
    return [_common(call), *[None] * (call.world_size - 1)]


class Dispatch:
    """The ready dispatch modes."""

    ONE_TO_ALL = DispatchMode("ONE_TO_ALL", _to_all, _list_by_rank)
    """The same arguments to every rank; a list by rank."""

    RANK_ZERO = DispatchMode("RANK_ZERO", _to_rank_zero, lambda call, answers: answers[0])
    """Runs on rank 0 alone; its value."""


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
    )


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> DispatchMode:
    """The long name of `on_mesh`, for those who come from verl."""
    return on_mesh(mesh_name)


# ------------------------------------------------------------------------------------------------ dealing rows


def _is(kind: str, value: Any) -> bool:
    """`is_batch`, or isinstance of `Rows`, of core.rows; without importing torch where nobody has."""
    module = sys.modules.get("core.rows")
    if module is None and "tensordict" in sys.modules:
        import core.rows as module
    if module is None:
        return False
    return bool(module.is_batch(value) if kind == "batch" else isinstance(value, module.Rows))


def deal_rows(num_rows: int, dp_size: int, num_blocks: int, where: str) -> tuple[Shard, ...]:
    """The shard of each dp rank: from every block an equal run of rows, in order.

    Raises:
        Refused: the rows don't divide.
    """
    unit = dp_size * num_blocks
    if num_blocks < 1 or num_rows % unit or not num_rows:
        low = num_rows // unit * unit
        legal = [size for size in (low, low + unit) if size > 0] if unit > 0 else []
        blocks = f" x {num_blocks} mini-batches" if num_blocks != 1 else ""
        raise Refused(
            f"a batch of {num_rows} rows cannot be dealt evenly over dp size {dp_size}{blocks}",
            have=f"{num_rows} rows",
            want="one of the nearest legal sizes: " + ", ".join(map(str, legal)),
            where=where,
            mend=f"make the number of rows a multiple of {unit}",
        )
    run = num_rows // unit
    block = num_rows // num_blocks
    return tuple(
        Shard(tuple((b * block + dp * run, b * block + (dp + 1) * run) for b in range(num_blocks)), num_blocks)
        for dp in range(dp_size)
    )


def _batch_rows(call: Call) -> int | None:
    """Rows of the call's batches, None when it has none."""
    from core.batch import num_rows

    sizes: dict[str, int] = {}
    for name, value in call.arguments.arguments.items():
        kind = call.arguments.signature.parameters[name].kind
        values = {name: value}
        if kind is inspect.Parameter.VAR_POSITIONAL:
            values = {f"{name}[{i}]": item for i, item in enumerate(value)}
        elif kind is inspect.Parameter.VAR_KEYWORD:
            values = dict(value)
        sizes |= {key: num_rows(item) for key, item in values.items() if _is("batch", item)}
    if len(set(sizes.values())) > 1:
        raise Refused(
            "the batches of one call differ in length",
            have=", ".join(f"{name}: {rows} rows" for name, rows in sizes.items()),
            want="as many rows in each",
            where=call.where,
        )
    return next(iter(sizes.values()), None)


def _of_arguments(call: Call, value: Any) -> Any:
    """A setting that may be a function of the method's arguments."""
    if not callable(value):
        return value
    bound = call.arguments.signature.bind(*call.arguments.args, **call.arguments.kwargs)
    bound.apply_defaults()
    return value(**bound.arguments)


def _deal(call: Call, route: Route) -> Sequence[RankCall]:
    rows = _batch_rows(call)
    if rows is None:
        return _to_all(call)
    from core.rows import Rows

    args, kwargs = (
        [Rows.of(value) if _is("batch", value) else value for value in call.arguments.args],
        {key: Rows.of(value) if _is("batch", value) else value for key, value in call.arguments.kwargs.items()},
    )
    shards = deal_rows(rows, route.dp_size, _of_arguments(call, call.spec.num_blocks), call.where)

    def for_shard(shard: Shard) -> RankCall:
        def cut(value: Any) -> Any:
            return value.take(shard.ranges) if isinstance(value, Rows) else value

        return RankCall(tuple(map(cut, args)), {key: cut(value) for key, value in kwargs.items()}, shard)

    by_dp = [for_shard(shard) for shard in shards]
    return [by_dp[dp] for dp in route.dp_ranks]


# ------------------------------------------------------------------------------------------------ joining answers


def _join(call: Call, route: Route, answers: Mapping[int, Any]) -> Any:
    by_dp = [answers[rank] for rank in route.collectors]
    result = join_answers(by_dp, f"the answer of {call.where}", route.collectors)
    return _restore(call, route, _batch_rows(call), result)


def join_answers(parts: Sequence[Any], where: str, ranks: Sequence[int]) -> Any:
    """Join what the collected ranks answered, by dp rank.

    Batches are concatenated, Metrics joined as they declare, dicts and tuples joined item by item, None stays None.
    What is none of these keeps every rank's value, in a list by dp rank.

    Raises:
        Refused: some ranks answered None, or another kind of value, where the others answered a batch.
    """
    from core.protocols import Metric

    first = parts[0]
    kinds = ["a batch" if _is("rows", part) else type(part).__name__ for part in parts]
    if len(set(kinds)) > 1 and {"a batch", "NoneType", "Metric", "dict"} & set(kinds):
        odd = [f"rank {rank}: {kind}" for rank, kind in zip(ranks, kinds, strict=True)]
        raise Refused(
            f"ranks answered different kinds of value in {where}",
            have=", ".join(odd),
            want="the same kind from every collected rank",
            mend="return the same kind of value on all ranks",
        )
    if _is("rows", first):
        return type(first).concat(parts, where)
    if first is None:
        return None
    if isinstance(first, Metric):
        return Metric.join(parts, where)
    if isinstance(first, dict):
        if len({frozenset(part) for part in parts}) != 1:
            have = {rank: sorted(map(str, part)) for rank, part in zip(ranks, parts, strict=True)}
            raise Refused(f"ranks answered dicts with different keys in {where}", have=have)
        return {key: join_answers([part[key] for part in parts], f"{where}[{key!r}]", ranks) for key in first}
    if isinstance(first, tuple) and len({len(part) for part in parts}) == 1:
        return tuple(
            join_answers(list(items), f"{where}[{i}]", ranks) for i, items in enumerate(zip(*parts, strict=True))
        )
    return list(parts)


def _restore(call: Call, route: Route, given: int | None, result: Any) -> Any:
    """Check the number of rows of answered batches, undo the order of blocks, and make TensorDicts of them."""
    if isinstance(result, tuple):
        return tuple(_restore(call, route, given, item) for item in result)
    if isinstance(result, dict):
        return {key: _restore(call, route, given, item) for key, item in result.items()}
    if not _is("rows", result):
        return result
    import torch

    per_input = _of_arguments(call, call.spec.rows_per_input) if given is not None else None
    if per_input is not None and result.num != given * per_input:
        raise Refused(
            f"{call.where} answered another number of rows than it was given",
            have=f"{result.num} rows",
            want=f"{given} rows x {per_input}",
            mend="return one row for each row, or declare rows_per_input in register",
        )
    num_blocks = _of_arguments(call, call.spec.num_blocks)
    if given is not None and per_input is not None and num_blocks != 1:
        shards = deal_rows(given, route.dp_size, num_blocks, call.where)
        order = torch.tensor([row for shard in shards for row in shard.row_numbers()])
        back = torch.argsort(order)
        result = result.select((back[:, None] * per_input + torch.arange(per_input)).reshape(-1))
    return result.batch()
