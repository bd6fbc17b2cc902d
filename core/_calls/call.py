"""What a call of a group's method is made of: who runs it, with which arguments, dealt and joined by which rule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import attrs

from core._rows.shards import DealBy, Shard, Uneven
from core.errors import Refused, did_you_mean
from core.mesh import Route

RowsPerInput = int | str | Callable[..., int] | None
NumBlocks = int | str | Callable[..., int]

if TYPE_CHECKING:
    import typing_extensions

    Decorator_co = typing_extensions.TypeVar("Decorator_co", covariant=True, default="Undeclared")
else:
    Decorator_co = TypeVar("Decorator_co", covariant=True)


class Undeclared:
    """For type checkers: a DispatchMode that doesn't say what it makes of a method's type."""


class Execute(Enum):
    """Which ranks run a method."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


@attrs.frozen(init=False)
class PerRank:
    """An argument that differs by rank: `PerRank([a, b, c, d])` gives rank 2 the value c. A list is never guessed to be
    one."""

    values: tuple[Any, ...]

    def __init__(self, values: Sequence[Any]) -> None:
        self.__attrs_init__(tuple(values))

    def of(self, rank: int, world_size: int, where: str) -> Any:
        if len(self.values) != world_size:
            raise Refused(
                "a PerRank argument has one value for each rank",
                have=f"{len(self.values)} values",
                want=f"{world_size}",
                where=where,
            )
        return self.values[rank]


@attrs.frozen(eq=False)
class RankCall:
    """What one rank is to run. Ranks that get the same arguments share one RankCall, and these travel once.

    Attributes:
        shard: the driver's rows that the arguments bring; None where they bring none.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    shard: Shard | None = None

    def values(self) -> list[Any]:
        return [*self.args, *self.kwargs.values()]

    def map(self, function: Callable[[Any], Any], shard: Shard | None = None) -> RankCall:
        """The function of each argument, with this shard; its own when not given."""
        kwargs = {name: function(value) for name, value in self.kwargs.items()}
        return RankCall(tuple(map(function, self.args)), kwargs, shard or self.shard)


@attrs.frozen
class Command:
    """What all ranks of a call are told alike.

    Attributes:
        reads_only: the method may be given memory that others read too.
        stores: batches of the answers stay in the transport's store (core._rows.stored).
    """

    method: str
    mesh: str | None = None
    reads_only: bool = False
    stores: bool = False


@attrs.define
class Call:
    """One call of a group's method, on the driver.

    Attributes:
        arguments: the bound signature, without self.
        route: the checked route of the mode's mesh; where the mode has none, each rank is a dp rank and is collected.
        shards: the rows of each dp rank, noted by `dispatch` for `collect`; None where no batch was given.
        rows_per_input: rows of the answer for each row given; None where that isn't known.
        own_weights: the caller's batches had a column `row_weight`.
        source: the transport, where batches of the answers stay with its workers.
    """

    group: str
    world_size: int
    method: str
    spec: MethodSpec
    arguments: inspect.BoundArguments
    route: Route
    shards: tuple[Shard, ...] | None = None
    rows_per_input: int | None = None
    own_weights: bool = False
    source: Any = None

    @property
    def where(self) -> str:
        mesh = f" on mesh {self.spec.mesh!r}" if self.spec.mesh else ""
        return f"method {self.method!r} of group {self.group!r}{mesh}"

    @property
    def num_rows(self) -> int | None:
        """Rows of the batches given; None where there are none, or they were not dealt."""
        return None if self.shards is None else sum(shard.num_real for shard in self.shards)

    @property
    def has_filler(self) -> bool:
        return self.shards is not None and any(shard.has_filler for shard in self.shards)

    def setting(self, value: Any) -> Any:
        """A setting of the spec: a number, the name of the method's argument that holds it, or a function of arguments.

        Raises:
            Refused: the method has no such argument.
        """
        if isinstance(value, int | None):
            return value
        arguments = self.arguments.signature.bind(*self.arguments.args, **self.arguments.kwargs)
        arguments.apply_defaults()
        values = arguments.arguments
        if isinstance(value, str):
            if value not in values:
                raise Refused(
                    f"{self.method!r} has no argument {value!r}, which its registration names",
                    where=self.where,
                    mend=did_you_mean(value, values),
                )
            return values[value]
        parameters = inspect.signature(value).parameters  # an override may have arguments that its parent's lacks
        return value(**{name: item for name, item in values.items() if name in parameters})


@attrs.frozen
class DispatchMode(Generic[Decorator_co]):
    """A rule to deal and join.

    For type checkers its parameter is the decorator that `register` then is; see core._run.typed.

    Attributes:
        dispatch: from a Call one RankCall for each rank, None for a rank that shall not run.
        collect: from a Call and the answers by rank the driver's result. Gets only the ranks in `answering`.
        answering: the ranks whose answers are sent to the driver; None for all.
        mesh: name of the mesh it routes by, if any.
        joins_rows: batches of the answers are joined by `collect`, so they can also stay with the workers.
        on_tables: dispatch gets futures and collect gets answers as they are, in the form that crosses between
            processes. A mode outside of core leaves it False: it gets values.
    """

    name: str
    dispatch: Callable[[Call], Sequence[RankCall | None]]
    collect: Callable[[Call, Mapping[int, Any]], Any]
    answering: Callable[[Call], frozenset[int]] | None = None
    mesh: str | None = None
    joins_rows: bool = False
    on_tables: bool = False


@attrs.frozen
class MethodSpec:
    """What `register` hangs on a method: its options, and their defaults. See core.dispatch.register."""

    dispatch_mode: DispatchMode[Any] | str
    execute_mode: Execute = Execute.ALL
    blocking: bool = True
    rows_per_input: RowsPerInput = 1
    num_blocks: NumBlocks = 1
    uneven: Uneven = "error"
    reducers: Mapping[str, Any] = attrs.field(factory=dict)
    timeout_s: float | None = None
    columns: Collection[str] | None = None
    reads_only: bool = False
    deal_by: DealBy = "rows"

    @property
    def mode(self) -> DispatchMode[Any]:
        """The mode, which a name of a plugin's has become when the class was bound."""
        assert isinstance(self.dispatch_mode, DispatchMode)
        return self.dispatch_mode

    @property
    def mesh(self) -> str | None:
        return self.mode.mesh
