"""Joining what the ranks answered."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from core.errors import Refused, did_you_mean


@attrs.frozen
class WeightedMean:
    """Reducer: the mean of a key's values, each weighted by the same answer's value under `by`."""

    by: str

    def __call__(self, values: Sequence[Any], parts: Sequence[Mapping[str, Any]]) -> Any:
        weights = [part[self.by] for part in parts]
        return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def _same(values: Sequence[Any]) -> Any:
    if any(value != values[0] for value in values):
        raise Refused("values that must be the same on all ranks differ", have=list(values))
    return values[0]


REDUCERS: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    "sum": sum,
    "mean": lambda values: sum(values) / len(values),
    "max": max,
    "min": min,
    "concat": lambda values: [item for value in values for item in value],
    "first": lambda values: values[0],
    "same": _same,
}
Reducer = str | WeightedMean | Callable[[Sequence[Any]], Any]


def check_reducers(reducers: Mapping[str, Reducer]) -> None:
    """Raises Refused for a reducer that there is not."""
    for key, reducer in reducers.items():
        if isinstance(reducer, str) and reducer not in REDUCERS:
            raise Refused(f"unknown reducer {reducer!r} for {key!r}", mend=did_you_mean(reducer, REDUCERS))


def is_rows(value: Any) -> bool:
    """A batch in pieces (core._rows.rows.Rows, or Kept elsewhere), asked without importing torch where nobody has."""
    module, remote = sys.modules.get("core._rows.rows"), sys.modules.get("core._rows.remote")
    return (module is not None and isinstance(value, module.Rows)) or (
        remote is not None and isinstance(value, remote.Kept)
    )


def is_remote(value: Any) -> bool:
    """A joined batch that lies elsewhere (core._rows.remote.RemoteRows)."""
    module = sys.modules.get("core._rows.remote")
    return module is not None and isinstance(value, module.RemoteRows)


def join_answers(
    parts: Sequence[Any],
    where: str,
    ranks: Sequence[int],
    num_rows: Sequence[int] | None = None,
    reducers: Mapping[str, Reducer] | None = None,
) -> Any:
    """Join what the collected ranks answered, by dp rank.

    Batches are concatenated, Metrics joined as they declare, dicts and tuples joined item by item, None stays None.
    What is none of these keeps every rank's value, in a list by dp rank.

    Args:
        ranks: who answered, for errors.
        num_rows: rows that each part's batches must have; None: any.
        reducers: how the values of dicts are joined, by key.

    Raises:
        Refused: a batch has other rows than it must have; or some ranks answered None, or another kind of value, where
            the others answered a batch.
    """
    from core.loss import Metric

    first = parts[0]
    kinds = ["a batch" if is_rows(part) else type(part).__name__ for part in parts]
    if len(set(kinds)) > 1 and {"a batch", "NoneType", "Metric", "dict"} & set(kinds):
        odd = [f"rank {rank}: {kind}" for rank, kind in zip(ranks, kinds, strict=True)]
        raise Refused(
            f"ranks answered different kinds of value in {where}",
            have=", ".join(odd),
            want="the same kind from every collected rank",
            mend="return the same kind of value on all ranks",
        )
    if is_rows(first):
        for rank, part, wanted in zip(ranks, parts, num_rows or (), strict=False):
            if part.num != wanted:
                raise Refused(
                    f"rank {rank} answered another number of rows than it was given",
                    have=f"{part.num} rows",
                    want=f"{wanted} rows",
                    where=where,
                    mend="return one row for each row, or declare rows_per_input in register",
                )
        return type(first).concat(parts, where)
    if first is None:
        return None
    if isinstance(first, Metric):
        return Metric.join(parts, where)
    if isinstance(first, dict):
        if len({frozenset(part) for part in parts}) != 1:
            have = {rank: sorted(map(str, part)) for rank, part in zip(ranks, parts, strict=True)}
            raise Refused(f"ranks answered dicts with different keys in {where}", have=have)
        out = {}
        for key in first:
            values, reducer = [part[key] for part in parts], (reducers or {}).get(key)
            if reducer is not None and any(map(is_rows, values)):
                raise Refused(f"a batch is joined row by row, not by a reducer, in {where}[{key!r}]", have=reducer)
            if isinstance(reducer, WeightedMean):
                out[key] = reducer(values, parts)
            elif reducer is not None:
                out[key] = (REDUCERS[reducer] if isinstance(reducer, str) else reducer)(values)
            else:
                out[key] = join_answers(values, f"{where}[{key!r}]", ranks, num_rows)
        return out
    if isinstance(first, tuple) and len({len(part) for part in parts}) == 1:
        return tuple(
            join_answers(list(items), f"{where}[{i}]", ranks, num_rows, reducers)
            for i, items in enumerate(zip(*parts, strict=True))
        )
    return list(parts)
