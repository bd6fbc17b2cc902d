"""One kind of thing that holds rows. Needs no torch: a driver's control path works on tables without looking inside."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

from core._rows.shards import Shard

if TYPE_CHECKING:
    from tensordict import TensorDict

Get = Callable[[Sequence[Any]], list[Any]]
"""Gets values of a transport's store, by their handles."""


class Table(ABC):
    """The rows of a batch, wherever they are: in this process (`Rows`), with the workers that made them (`StoredPart`
    of one rank, `StoredRows` of all), or on their way to a rank (`RowsToFetch`).
    """

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Names of the columns."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    def __bool__(self) -> bool:
        return True  # a table of no rows is a table

    @abstractmethod
    def batch(self, get: Get | None = None, tensor: Callable[[Any], Any] | None = None) -> TensorDict:
        """The rows as a TensorDict in this process.

        Args:
            get: gets values of the store; what lies there cannot be had without.
            tensor: makes a tensor of its form on the wire, where the rows have that form.
        """


class WholeTable(Table):
    """A batch that a driver holds: it can be dealt, and brought into another order."""

    @abstractmethod
    def only(self, is_chosen: Callable[[str], bool]) -> Self:
        """The same rows of fewer columns."""

    @abstractmethod
    def row_tokens(self) -> Sequence[int] | None:
        """Tokens of each row, by `input_ids`, `prompt_ids`, the first jagged column or `attention_mask`; None where
        there is none of them."""

    @abstractmethod
    def row_groups(self) -> Sequence[int] | None:
        """The `group_id` of each row; None where there is no such column."""

    @abstractmethod
    def shard(self, shard: Shard, *, with_weights: bool) -> Table:
        """The rows of a shard, for the ranks that get it. Filler is copies of real rows; a copied group gets a
        `group_id` of its own.

        Args:
            with_weights: add the column `row_weight`, 0 for filler: where any shard has filler all shards need it.
        """

    @abstractmethod
    def on_wire(self) -> Table:
        """All rows, in the form that crosses between processes."""

    @abstractmethod
    def restored(self, shards: tuple[Shard, ...], rows_per_input: int) -> WholeTable:
        """Joined answers in the order of the driver's rows, without those of filler."""

    @abstractmethod
    def result(self, source: Any, origin: str) -> Any:
        """A joined batch as the driver gets it: a TensorDict, or a table where the rows lie with workers.

        Args:
            source: the transport of these workers.
            origin: the call that made it, for errors.
        """


class PartTable(Table):
    """What one rank answered: it can be joined with the others' parts."""

    @staticmethod
    @abstractmethod
    def joined(parts: Sequence[Any], where: str = "") -> WholeTable:
        """Rows of all parts one after another, always copies where they lie in this process.

        Raises:
            Refused: columns differ in name, form, dtype or width, or metadata in value.
        """


class Deferred(ABC):
    """A value that is yet to come, and may be an argument meanwhile."""

    @abstractmethod
    def awaited(self, where: str) -> Any:
        """The value; a batch that lies with workers as a table. `where` is the call that needs it, for errors."""
