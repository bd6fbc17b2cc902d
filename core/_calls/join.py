"""Joining what the ranks answered: one walk over the answers, which are in the form that crosses between processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from core._calls.call import Call, Execute
from core._rows.table import PartTable, WholeTable
from core._rows.wire import decode, mapped, reading
from core._rows.wire_tensor import equal
from core.errors import BadAnswer, Refused, did_you_mean
from core.loss import Metric


@attrs.frozen
class WeightedMean:
    """Reducer: the mean of a key's values, each weighted by the same answer's value under `by`."""

    by: str

    def __call__(self, values: Sequence[Any], parts: Sequence[Mapping[str, Any]]) -> Any:
        weights = [part[self.by] for part in parts]
        return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def _same(values: Sequence[Any]) -> Any:
    if not all(equal(value, values[0]) for value in values):
        raise BadAnswer("values that must be the same on all ranks differ", have=list(values))
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


def join(call: Call, answers: Mapping[int, Any]) -> Any:
    """Join the collected ranks' answers by dp rank.

    Batches are concatenated and brought into the order of the driver's rows, Metrics become one number as they declare,
    dicts and tuples are joined item by item, None stays None. What is none of these keeps every rank's value, in a list
    by dp rank.

    Raises:
        BadAnswer: a batch has other rows than it must have, ranks answered different kinds of value or different keys,
            columns or metadata don't fit together, metrics that must be the same differ.
    """
    ranks = call.route.collectors
    joiner = _Joiner(call, ranks, call.spec.reducers)
    return joiner.join([answers[rank] for rank in ranks], f"the answer of {call.where}", top=True)


@attrs.frozen
class _Joiner:
    call: Call
    ranks: Sequence[int]  # who answered, by dp rank
    reducers: Mapping[str, Reducer]

    def join(self, parts: Sequence[Any], where: str, *, top: bool = False) -> Any:
        first = parts[0]
        self._check_kinds(parts, where)
        if isinstance(first, PartTable):
            return self._rows(parts, where)
        if first is None:
            return None
        if isinstance(first, Metric):
            return Metric.join(parts, where).value
        if isinstance(first, dict):
            return self._dicts(parts, where, self.reducers if top else {})
        if isinstance(first, tuple) and len({len(part) for part in parts}) == 1:
            items = enumerate(zip(*parts, strict=True))
            return tuple(self.join(item, f"{where}[{i}]", top=top) for i, item in items)
        return [own(part) for part in parts]

    def _rows(self, parts: Sequence[Any], where: str) -> Any:
        shards, rows_per_input = self.call.shards, self.call.rows_per_input
        if shards is None or rows_per_input is None:
            return _concat(parts, where).result(self.call.source, self.call.where)
        for rank, part, shard in zip(self.ranks, parts, shards, strict=True):
            if len(part) != rows_per_input * sum(shard.sizes):
                raise BadAnswer(
                    f"rank {rank} answered another number of rows than it was given",
                    have=f"{len(part)} rows",
                    want=f"{rows_per_input * sum(shard.sizes)} rows",
                    where=where,
                    mend="return one row for each row, or declare rows_per_input in register",
                )
        rows = _concat(parts, where).restored(shards, rows_per_input)
        # The weights that came with the filler go with it.
        added = self.call.has_filler and not self.call.own_weights
        rows = rows.only(lambda name: name != "row_weight") if added else rows
        return rows.result(self.call.source, self.call.where)

    def _dicts(self, parts: Sequence[Any], where: str, reducers: Mapping[str, Reducer]) -> dict[Any, Any]:
        if len({frozenset(part) for part in parts}) != 1:
            have = {rank: sorted(map(str, part)) for rank, part in zip(self.ranks, parts, strict=True)}
            raise BadAnswer(f"ranks answered dicts with different keys in {where}", have=have)
        return {key: self._item(key, parts, where, reducers.get(key)) for key in parts[0]}

    def _item(self, key: Any, parts: Sequence[Any], where: str, reducer: Reducer | None) -> Any:
        values = [part[key] for part in parts]
        if reducer is None:
            return self.join(values, f"{where}[{key!r}]")
        if any(isinstance(value, PartTable) for value in values):
            raise BadAnswer(f"a batch is joined row by row, not by a reducer, in {where}[{key!r}]", have=reducer)
        if isinstance(reducer, WeightedMean):
            weights = [{reducer.by: decode(part[reducer.by])} for part in parts]
            return reducer([decode(value) for value in values], weights)
        return (REDUCERS[reducer] if isinstance(reducer, str) else reducer)([decode(value) for value in values])

    def _check_kinds(self, parts: Sequence[Any], where: str) -> None:
        kinds = ["a batch" if isinstance(part, PartTable) else type(part).__name__ for part in parts]
        if len(set(kinds)) > 1 and {"a batch", "NoneType", "Metric", "dict"} & set(kinds):
            by_rank = [f"rank {rank}: {kind}" for rank, kind in zip(self.ranks, kinds, strict=True)]
            raise BadAnswer(
                f"ranks answered different kinds of value in {where}",
                have=", ".join(by_rank),
                want="the same kind from every collected rank",
                mend="return the same kind of value on all ranks",
            )


def _concat(parts: Sequence[Any], where: str) -> WholeTable:
    try:
        with reading():  # what is read here is copied
            table: WholeTable = type(parts[0]).joined(parts, where)
    except Refused as error:
        raise BadAnswer.of(error) from error
    return table


def own(answer: Any) -> Any:
    """One rank's answer as the driver gets it."""
    return mapped(decode(answer), lambda item: item.value if isinstance(item, Metric) else item)


def list_by_rank(call: Call, answers: Mapping[int, Any]) -> Any:
    """Every rank's own answer; of a method that rank 0 runs alone, its answer."""
    if call.spec.execute_mode is Execute.RANK_ZERO:
        return own(answers[0])
    return [own(answers[rank]) for rank in range(call.world_size)]


def of_rank_zero(call: Call, answers: Mapping[int, Any]) -> Any:
    """Rank 0's answer."""
    return own(answers[0])


def same_on_all(call: Call, answers: Mapping[int, Any]) -> Any:
    """The one answer that all ranks gave. Raises BadAnswer where they differ."""
    if not all(equal(answer, answers[0]) for answer in answers.values()):
        have = {rank: own(answer) for rank, answer in answers.items()}
        raise BadAnswer("the ranks don't agree", have=have, want="one answer", where=call.where)
    return own(answers[0])


def joined_and_own(call: Call, answers: Mapping[int, Any]) -> Any:
    """(answers joined, a list of every rank's own)."""
    return join(call, answers), [own(answers[rank]) for rank in range(call.world_size)]
