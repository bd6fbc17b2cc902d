"""Batches: TensorDicts whose columns are dense tensors, jagged nested tensors, object columns or metadata.

- dense: first dim is rows.
- jagged: `torch.nested` with layout jagged, rows x tokens (x more dims), or with tokens on a later dim, as in
  (rows, 3, tokens). Handled by values and offsets, not by row.
- object column: NonTensorStack, one Python object a row.
- metadata: NonTensorData, one Python object for the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from core._rows.columns import contiguous as contiguous
from core._rows.columns import flat as flat
from core._rows.columns import group_ids, objects_in, ragged_dim, starts
from core._rows.columns import is_batch as is_batch
from core._rows.columns import is_jagged as is_jagged
from core._rows.columns import nested as nested
from core._rows.columns import object_column as object_column
from core._rows.rows import Rows
from core._rows.shards import Range, rows_of_groups
from core.columns import INPUTS
from core.errors import Refused


def num_rows(batch: TensorDictBase) -> int:
    if len(batch.batch_size) != 1:
        raise Refused("a batch has rows: its batch_size is (rows,)", have=tuple(batch.batch_size))
    return int(batch.batch_size[0])


def columns(batch: TensorDictBase) -> dict[str, Any]:
    """Raw columns by name: tensors, NonTensorStack, NonTensorData, or nested batches."""
    return {name: batch.get(name) for name in batch.keys()}  # noqa: SIM118


def metadata(batch: TensorDictBase, name: str, default: Any = None) -> Any:
    """The metadata `name`, or the default where the batch has none.

    Raises:
        Refused: there is a column of that name, which is not one value for all rows.
    """
    value = batch.get(name, None)
    if value is not None and not isinstance(value, NonTensorData):
        raise Refused(
            f"{name!r} is metadata, one value for the whole batch",
            have=f"a column of {type(value).__name__}",
            mend=f"set it with core.batch.with_metadata(batch, {name}=...)",
        )
    return default if value is None else value.data


def with_metadata(batch: TensorDict, **values: Any) -> TensorDict:
    """Set metadata in place; returns the batch."""
    for name, value in values.items():
        batch.set(name, NonTensorData(value, batch_size=batch.batch_size))
    return batch


def objects(column: NonTensorStack) -> list[Any]:
    """The objects of an object column, by row: those in the column, no copies."""
    return objects_in(column)


def jagged(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """A jagged column from one tensor a row. Raises Refused for no rows: then their dtype is unknown."""
    if not rows:
        raise Refused("a jagged column is made from at least one row", mend="use jagged_from for none")
    return jagged_from(torch.cat(list(rows)), torch.tensor([len(row) for row in rows]))


def jagged_from(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """A jagged column from all tokens in row order, and each row's length."""
    return nested(values, starts(lengths))


def row_lengths(batch: TensorDictBase) -> torch.Tensor:
    """Tokens in each row, int64 (rows,), on CPU: of `input_ids`, or of the first jagged token column.

    Raises:
        Refused: the batch has neither a jagged column nor attention_mask.
    """
    names = [name for name in ("input_ids", "prompt_ids") if name in batch.keys()]  # noqa: SIM118
    names += [name for name, value in columns(batch).items() if _is_jagged_tokens(name, value)]
    for name in names:
        if is_jagged(column := batch.get(name)):
            return flat(column)[1].diff().cpu()
    mask = batch.get("attention_mask", None)
    if mask is not None:
        lengths: torch.Tensor = mask.bool().sum(1, dtype=torch.int64).cpu()
        return lengths
    raise Refused(
        "cannot tell the lengths of the batch's rows",
        have=sorted(batch.keys()),
        want="a jagged input_ids, or padded columns with attention_mask",
    )


def token_values(column: torch.Tensor) -> torch.Tensor:
    """All tokens of a jagged column, in row order: (tokens, ...). A view, unless the column has holes.

    Raises:
        Refused: the column is padded, or no token column.
    """
    if not is_jagged(column):
        raise Refused(
            "the values of a padded column are not told from its padding",
            have=f"a dense column {tuple(column.shape)}",
            want="a jagged column (rows, tokens, ...)",
            mend="core.batch.to_jagged(batch)",
        )
    return flat(column)[0]


def response_lengths(response_mask: torch.Tensor) -> torch.Tensor:
    """Response tokens of each row, int64 (rows,).

    Args:
        response_mask: bool (rows, tokens), jagged or padded; in a padded one False where there is padding.
    """
    if not is_jagged(response_mask):
        return response_mask.sum(1, dtype=torch.int64)
    values, offsets = flat(response_mask)
    # torch's sum of jagged rows is slow; a running count read off where the rows end is not.
    return starts(values)[offsets].diff()


def response_tokens(column: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """A token column's values at response tokens alone, in row order: (response tokens, ...).

    `response_tokens(ids, mask).split(response_lengths(mask).tolist())` has them by row.

    Args:
        column: (rows, tokens, ...), jagged or padded as the mask is.
        response_mask: bool (rows, tokens).

    Raises:
        Refused: column and mask are not aligned.
    """
    values, mask = (flat(each)[0] if is_jagged(each) else each for each in (column, response_mask))
    if is_jagged(column) != is_jagged(response_mask) or values.shape[: mask.dim()] != mask.shape:
        raise Refused(
            "the column is not aligned with the response mask",
            have=f"a column {_form(column)}, a mask {_form(response_mask)}",
            want="both jagged or both padded, with the same rows and tokens",
        )
    return values[mask.bool()]


def spread_over_response(by_row: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """A value for each row, written to the row's response tokens, and 0 elsewhere: what advantages are.

    Args:
        by_row: (rows,).
        response_mask: bool (rows, tokens), jagged or padded; the result is aligned with it.

    Raises:
        Refused: another number of values than rows.
    """
    if by_row.shape != response_mask.shape[:1]:
        raise Refused(
            "one value for each row is spread over its response tokens",
            have=f"values {tuple(by_row.shape)}, {response_mask.shape[0]} rows",
            want="values (rows,)",
        )
    if not is_jagged(response_mask):
        return by_row[:, None] * response_mask
    values, offsets = flat(response_mask)
    return nested(by_row.repeat_interleave(offsets.diff()) * values, offsets)


def _form(column: torch.Tensor) -> str:
    return f"jagged with {len(flat(column)[0])} tokens" if is_jagged(column) else f"padded {tuple(column.shape)}"


def row_groups(batch: TensorDictBase) -> dict[int, list[int]] | None:
    """By `group_id` the rows that belong together, in order; None where the batch has no such column.

    Raises:
        Refused: `group_id` is no int64 column of shape (rows,).
    """
    column = batch.get("group_id", None)
    return None if column is None else rows_of_groups(group_ids(column))


def take(batch: TensorDictBase, ranges: Sequence[Range]) -> TensorDict:
    """Rows of the ranges, in the order given. One range gives views, several give copies."""
    return Rows.of(batch).take(ranges).batch()


def select(batch: TensorDictBase, index: torch.Tensor) -> TensorDict:
    """Copies of the rows in `index` (int64), in that order; rows may repeat."""
    return Rows.of(batch).select(index).batch()


def concat(batches: Sequence[TensorDictBase], where: str = "") -> TensorDict:
    """Rows of all batches one after another, always copies.

    Raises:
        Refused: columns differ in name, form, dtype or width, or metadata differ in value.
    """
    return Rows.concat([Rows.of(batch) for batch in batches], where).batch()


def to_padded(
    batch: TensorDictBase,
    *,
    rows: torch.Tensor | None = None,
    multiple: int = 1,
    pads: Mapping[str, float] | None = None,
) -> TensorDict:
    """Jagged columns padded on the right to (rows, width), with `attention_mask`. Model inputs keep their form.

    Args:
        rows: only these rows (int64), in that order; all where not given.
        multiple: the width is rounded up to a multiple.
        pads: what padding holds, by column; 0 elsewhere.

    Raises:
        Refused: jagged columns differ in the lengths of rows.
    """
    table = columns(batch)
    token_columns = [name for name, column in table.items() if _is_jagged_tokens(name, column)]
    if not token_columns:
        return select(batch, rows) if rows is not None else batch.select(*table)
    rest = batch.exclude(*token_columns)
    out: dict[str, Any] = columns(rest if rows is None else select(rest, rows))
    lengths = row_lengths(batch) if rows is None else row_lengths(batch)[rows]
    width = max(int(lengths.max()), 1) if len(lengths) else 0
    width = -(-width // multiple) * multiple
    mask = torch.arange(width)[None, :] < lengths[:, None]
    places: dict[int, tuple[Any, torch.Tensor, torch.Tensor]] = {}  # by id of offsets, which are kept
    for name in token_columns:
        values, offsets = flat(table[name])
        if id(offsets) not in places:
            firsts, ends = offsets[:-1], offsets[1:]
            if rows is not None:
                firsts, ends = firsts[rows.to(offsets.device)], ends[rows.to(offsets.device)]
            if not torch.equal((ends - firsts).cpu(), lengths):
                raise Refused(
                    f"column {name!r} is not aligned with the other token columns",
                    have=(ends - firsts).tolist(),
                    want=lengths.tolist(),
                )
            here = mask.to(offsets.device)
            at = firsts[:, None] + torch.arange(width, device=offsets.device)
            places[id(offsets)] = offsets, here, torch.where(here, at, 0)
        _, here, at = places[id(offsets)]
        pad = (pads or {}).get(name, 0)
        if not len(values):
            out[name] = values.new_full((*at.shape, *values.shape[1:]), pad).transpose(1, ragged_dim(table[name]))
            continue
        here = here.reshape(*here.shape, *[1] * (values.dim() - 1))
        padded = torch.where(here, values[at], torch.tensor(pad, dtype=values.dtype, device=values.device))
        dim = ragged_dim(table[name])
        out[name] = padded if dim == 1 else padded.transpose(1, dim)
    out.setdefault("attention_mask", mask)
    return _build(out, len(lengths))


def to_jagged(batch: TensorDictBase) -> TensorDict:
    """The inverse of to_padded: columns of the mask's shape become jagged, attention_mask goes.

    In the padded form a column (rows, width, ...) of just the mask's width counts as a token column.
    """
    mask = batch.get("attention_mask", None)
    if mask is None:
        return batch.copy() if isinstance(batch, TensorDict) else batch.to_tensordict()
    mask = mask.bool()  # tokenizers give int64
    offsets = starts(mask.sum(1, dtype=torch.int64))
    table = columns(batch)
    table.pop("attention_mask")

    def of(name: str, column: Any) -> Any:
        is_dense = isinstance(column, torch.Tensor) and not column.is_nested and not name.startswith(INPUTS)
        return nested(column[mask], offsets) if is_dense and column.shape[:2] == mask.shape else column

    return _build({name: of(name, column) for name, column in table.items()}, num_rows(batch))


def _is_jagged_tokens(name: str, column: Any) -> bool:
    return is_jagged(column) and not name.startswith(INPUTS)


def _build(table: Mapping[str, Any], rows: int) -> TensorDict:
    out = TensorDict({}, batch_size=[rows])
    for name, column in table.items():
        out.set(name, column)
    return out
