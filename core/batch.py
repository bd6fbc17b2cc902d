"""Batches: TensorDicts whose columns are dense tensors, jagged nested tensors, object columns or metadata.

- dense: first dim is rows.
- jagged: `torch.nested` with layout jagged, rows x tokens (x more dims). Handled by values and offsets, not by row.
- object column: NonTensorStack, one Python object a row.
- metadata: NonTensorData, one Python object for the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, is_tensor_collection

from core.errors import Refused

Range = tuple[int, int]  # rows start..stop-1


def is_batch(value: object) -> bool:
    """A TensorDict of columns, as against a tensordict's own wrappers of Python objects."""
    return isinstance(value, TensorDictBase) and not isinstance(value, NonTensorStack | NonTensorData)


def num_rows(batch: TensorDictBase) -> int:
    if not batch.batch_size:
        raise Refused("a batch has rows: its batch_size is (rows,)", have=tuple(batch.batch_size))
    return int(batch.batch_size[0])


def columns(batch: TensorDictBase) -> dict[str, Any]:
    """Raw columns by name: tensors, NonTensorStack, NonTensorData, or nested batches."""
    return {name: batch.get(name) for name in batch.keys()}  # noqa: SIM118


def metadata(batch: TensorDictBase, name: str, default: Any = None) -> Any:
    """The metadata `name`, or the default where the batch has none."""
    value = batch.get(name, None)
    return value.data if isinstance(value, NonTensorData) else default


def with_metadata(batch: TensorDict, **values: Any) -> TensorDict:
    """Set metadata in place; returns the batch."""
    for name, value in values.items():
        batch.set(name, NonTensorData(value, batch_size=batch.batch_size))
    return batch


def object_column(values: Sequence[Any]) -> NonTensorStack:
    """One Python object a row, kept by identity."""
    # A wrapper costs microseconds and columns often repeat a few words, so equal immutable objects share one.
    shared: dict[Any, NonTensorData] = {}

    def wrap(value: Any) -> NonTensorData:
        if type(value) not in (str, int, bool, type(None)):
            return NonTensorData(value)
        key = type(value), value
        if key not in shared:
            shared[key] = NonTensorData(value)
        return shared[key]

    return NonTensorStack(*[wrap(value) for value in values])


def objects(column: NonTensorStack) -> list[Any]:
    """The objects of an object column, by row."""
    return [item.data for item in column.tensordicts]


def is_jagged(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_nested


def jagged(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """A jagged column from one tensor a row. Raises Refused for no rows: then their dtype is unknown."""
    if not rows:
        raise Refused("a jagged column is made from at least one row", mend="use jagged_from for none")
    return jagged_from(torch.cat(list(rows)), torch.tensor([len(row) for row in rows]))


def jagged_from(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """A jagged column from all tokens in row order, and each row's length."""
    return _nested(values, _offsets(lengths))


def row_lengths(batch: TensorDictBase) -> torch.Tensor:
    """Tokens in each row, int64 (rows,), on CPU: of `input_ids`, or of the first jagged column.

    Raises:
        Refused: the batch has neither a jagged column nor attention_mask.
    """
    names = [name for name in ("input_ids", "prompt_ids") if name in batch.keys()]  # noqa: SIM118
    names += [name for name, value in columns(batch).items() if is_jagged(value)]
    for name in names:
        if is_jagged(column := batch.get(name)):
            return flat(column)[1].diff().cpu()
    mask = batch.get("attention_mask", None)
    if mask is not None:
        lengths: torch.Tensor = mask.sum(1, dtype=torch.int64).cpu()
        return lengths
    raise Refused(
        "cannot tell the lengths of the batch's rows",
        have=sorted(batch.keys()),
        want="a jagged input_ids, or padded columns with attention_mask",
    )


def contiguous(column: Any) -> Any:
    """The jagged column with its values packed without holes, tokens on dim 1."""
    if column.layout != torch.jagged:
        raise Refused("nested columns have layout torch.jagged", have=column.layout)
    if column._ragged_idx != 1:
        raise Refused("jagged columns have their ragged dim right after rows", have=column._ragged_idx)
    # The attributes, since each public accessor is a dispatch of a tenth of a millisecond.
    offsets = column._offsets
    plain = column._lengths is None and int(offsets[0]) == 0 and int(offsets[-1]) == column._values.shape[0]
    return column if plain else column.contiguous()


def flat(column: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A jagged column's tokens in row order, and the offsets at which rows begin and end. Detached, not copied."""
    column = contiguous(column)
    return column._values.detach(), column._offsets


def take(batch: TensorDictBase, ranges: Sequence[Range]) -> TensorDict:
    """Rows of the ranges, in the order given. One range gives views, several give copies."""
    if len(ranges) != 1:
        return concat([take(batch, [each]) for each in ranges]) if ranges else take(batch, [(0, 0)])
    start, stop = ranges[0]
    offsets = _OffsetsCache(lambda old: old[start : stop + 1] - old[start])

    def rows_of(column: Any) -> Any:
        if is_jagged(column):
            values, old = flat(column)
            return _nested(values[int(old[start]) : int(old[stop])], offsets(old))
        if isinstance(column, NonTensorData):
            return NonTensorData(column.data, batch_size=[stop - start])
        if isinstance(column, NonTensorStack):
            return object_column(objects(column)[start:stop])
        return take(column, ranges) if is_batch(column) else column[start:stop]

    return _build({name: rows_of(column) for name, column in columns(batch).items()}, stop - start)


def select(batch: TensorDictBase, index: torch.Tensor) -> TensorDict:
    """Copies of the rows in `index` (int64), in that order; rows may repeat."""
    index = index.to(torch.int64)
    offsets = _OffsetsCache(lambda old: _offsets(old.diff()[index.to(old.device)]))

    def rows_of(column: Any) -> Any:
        if is_jagged(column):
            values, old = flat(column)
            new = offsets(old)
            shift = torch.repeat_interleave(old[index.to(old.device)] - new[:-1], new.diff())
            return _nested(values[torch.arange(len(shift), device=old.device) + shift], new)
        if isinstance(column, NonTensorData):
            return NonTensorData(column.data, batch_size=[len(index)])
        if isinstance(column, NonTensorStack):
            held = objects(column)
            return object_column([held[i] for i in index.tolist()])
        return select(column, index) if is_batch(column) else column[index.to(column.device)]

    return _build({name: rows_of(column) for name, column in columns(batch).items()}, len(index))


def concat(batches: Sequence[TensorDictBase], where: str = "") -> TensorDict:
    """Rows of all batches one after another, always copies.

    Raises:
        Refused: columns differ in name, form, dtype or width, or metadata differ in value.
    """
    if not batches:
        raise Refused("there is no batch to concatenate", where=where)
    tables = [columns(batch) for batch in batches]
    if len({frozenset(table) for table in tables}) != 1:
        have = {i: sorted(table) for i, table in enumerate(tables)}
        raise Refused("batches to be joined have different columns", have=have, where=where)
    total = sum(num_rows(batch) for batch in batches)
    joined_offsets: dict[tuple[int, ...], tuple[Any, torch.Tensor]] = {}

    def join(name: str, parts: list[Any]) -> Any:
        if len({_form(part) for part in parts}) != 1:
            forms = [_form(part) for part in parts]
            mend = "return token columns jagged" if _only_widths_differ(parts) else ""
            raise Refused(f"column {name!r} cannot be joined", have=forms, where=where, mend=mend)
        first = parts[0]
        if is_jagged(first):
            values, olds = zip(*map(flat, parts), strict=True)
            key = tuple(map(id, olds))
            if key not in joined_offsets:  # the old ones are kept too: an id is only its own while it lives
                joined_offsets[key] = olds, _offsets(torch.cat([old.diff() for old in olds]))
            return _nested(torch.cat(values), joined_offsets[key][1])
        if isinstance(first, NonTensorData):
            if any(not _equal(part.data, first.data) for part in parts):
                have = [part.data for part in parts]
                raise Refused(f"metadata {name!r} differs between shards", have=have, where=where)
            return NonTensorData(first.data, batch_size=[total])
        if isinstance(first, NonTensorStack):
            return NonTensorStack(*[item for part in parts for item in part.tensordicts])
        return concat(parts, where) if is_batch(first) else torch.cat(parts)

    return _build({name: join(name, [table[name] for table in tables]) for name in tables[0]}, total)


def to_padded(
    batch: TensorDictBase,
    *,
    rows: torch.Tensor | None = None,
    multiple: int = 1,
    pads: Mapping[str, float] | None = None,
) -> TensorDict:
    """Jagged columns padded on the right to (rows, width), with `attention_mask`.

    Args:
        rows: only these rows (int64), in that order; all where not given.
        multiple: the width is rounded up to a multiple.
        pads: what padding holds, by column; 0 elsewhere.

    Raises:
        Refused: jagged columns differ in the lengths of rows.
    """
    table = columns(batch)
    if not any(is_jagged(column) for column in table.values()):
        return select(batch, rows) if rows is not None else batch.select(*table)
    rest = batch.select(*(name for name, column in table.items() if not is_jagged(column)))
    out: dict[str, Any] = columns(rest if rows is None else select(rest, rows))
    lengths = row_lengths(batch) if rows is None else row_lengths(batch)[rows]
    width = int(lengths.max()) if len(lengths) else 0
    width = -(-width // multiple) * multiple
    mask = torch.arange(width)[None, :] < lengths[:, None]
    places: dict[int, tuple[Any, torch.Tensor, torch.Tensor]] = {}  # by offsets, which are kept: see concat
    for name in [name for name, column in table.items() if is_jagged(column)]:
        values, offsets = flat(table[name])
        if id(offsets) not in places:
            starts, ends = offsets[:-1], offsets[1:]
            if rows is not None:
                starts, ends = starts[rows.to(offsets.device)], ends[rows.to(offsets.device)]
            if not torch.equal((ends - starts).cpu(), lengths):
                raise Refused(
                    f"column {name!r} is not aligned with the other token columns",
                    have=(ends - starts).tolist(),
                    want=lengths.tolist(),
                )
            here = mask.to(offsets.device)
            at = starts[:, None] + torch.arange(width, device=offsets.device)
            places[id(offsets)] = offsets, here, torch.where(here, at, 0)
        _, here, at = places[id(offsets)]
        pad = (pads or {}).get(name, 0)
        if not len(values):
            out[name] = values.new_full((*at.shape, *values.shape[1:]), pad)
            continue
        here = here.reshape(*here.shape, *[1] * (values.dim() - 1))
        out[name] = torch.where(here, values[at], torch.tensor(pad, dtype=values.dtype, device=values.device))
    out.setdefault("attention_mask", mask)
    return _build(out, len(lengths))


def to_jagged(batch: TensorDictBase) -> TensorDict:
    """The inverse of to_padded: columns of the mask's shape become jagged, attention_mask goes.

    In the padded form a column (rows, width, ...) of just the mask's width counts as a token column.
    """
    mask = batch.get("attention_mask", None)
    if mask is None:
        return batch.copy() if isinstance(batch, TensorDict) else batch.to_tensordict()
    offsets = _offsets(mask.sum(1, dtype=torch.int64))
    table = columns(batch)
    table.pop("attention_mask")

    def of(column: Any) -> Any:
        is_token_column = (
            isinstance(column, torch.Tensor)
            and not is_tensor_collection(column)
            and not column.is_nested
            and column.shape[:2] == mask.shape
        )
        return _nested(column[mask], offsets) if is_token_column else column

    return _build({name: of(column) for name, column in table.items()}, num_rows(batch))


class _OffsetsCache:
    """Columns that shared their offsets share them afterwards, as arithmetic between nested tensors demands."""

    def __init__(self, make: Any) -> None:
        self._make, self._made = make, {}  # type: ignore[var-annotated]

    def __call__(self, old: torch.Tensor) -> torch.Tensor:
        # The old tensor is kept too: an id is only its own while it lives.
        if id(old) not in self._made:
            self._made[id(old)] = (old, self._make(old))
        made: torch.Tensor = self._made[id(old)][1]
        return made


def _nested(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(values, offsets.to(values.device))


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.to(torch.int64).cumsum(0), (1, 0))


def _build(table: Mapping[str, Any], rows: int) -> TensorDict:
    out = TensorDict({}, batch_size=[rows])
    for name, column in table.items():
        out.set(name, column)
    return out


def _form(column: Any) -> tuple[Any, ...]:
    if isinstance(column, NonTensorStack | NonTensorData):
        return (type(column).__name__,)
    if is_batch(column):
        return ("batch",)
    if column.is_nested:
        return ("jagged", str(column.dtype), *column.values().shape[1:])
    return ("dense", str(column.dtype), *column.shape[1:])


def _only_widths_differ(parts: Sequence[Any]) -> bool:
    return len({_form(part)[:2] for part in parts}) == 1


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:
        return a is b
