"""Faults of dispatch modes: what `dispatch` or `collect` does wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from tensordict import TensorDict, TensorDictBase

from core.batch import concat, select
from core.dispatch import Call, DispatchMode, PerRank, RankCall
from core.registry import Backend
from tests.sdk.kit.faults import Mutant, with_manifest

ORDER = "test_the_answer_has_the_callers_rows_in_the_callers_order"
Change = Callable[[DispatchMode], DispatchMode]


def mode_fault(name: str, *tests: str) -> Callable[[Change], Mutant]:
    """The mutant whose manifest has a changed mode."""

    def decorate(change: Change) -> Mutant:
        def of_entry(backend: Backend) -> Backend:
            return with_manifest(backend, factory=change(backend.load("factory")))

        return Mutant(name, tests, entry=of_entry)

    return decorate


def joined(mode: DispatchMode, change: Callable[[TensorDictBase], Any]) -> DispatchMode:
    """With a change of the batch that it answers."""

    def collect(call: Call, answers: Mapping[int, Any]) -> Any:
        result = mode.collect(call, answers)
        return change(result) if isinstance(result, TensorDictBase) else result

    return attrs.evolve(mode, collect=collect)


def dealt(mode: DispatchMode, change: Callable[[Call, Sequence[RankCall | None]], Any]) -> DispatchMode:
    """With a change of the calls that it makes."""
    return attrs.evolve(mode, dispatch=lambda call: change(call, mode.dispatch(call)))


@mode_fault("loses the last row", ORDER)
def loses_a_row(mode: DispatchMode) -> DispatchMode:
    return joined(mode, lambda batch: select(batch, torch.arange(len(batch) - 1)))


@mode_fault("gives the first row twice", ORDER)
def doubles_a_row(mode: DispatchMode) -> DispatchMode:
    return joined(mode, lambda batch: concat([batch, select(batch, torch.tensor([0]))]))


@mode_fault("gives the rows in another order", ORDER)
def permutes_rows(mode: DispatchMode) -> DispatchMode:
    return joined(mode, lambda batch: select(batch, torch.arange(len(batch) - 1, -1, -1)))


@mode_fault("joins the answers by rank, not by row", f"{ORDER}[world 2]")
def joins_by_rank(mode: DispatchMode) -> DispatchMode:
    def collect(call: Call, answers: Mapping[int, Any]) -> Any:
        batches = [answers[rank] for rank in sorted(answers)]
        return concat(batches) if isinstance(batches[0], TensorDictBase) else mode.collect(call, answers)

    return attrs.evolve(mode, collect=collect)


@mode_fault("has one rank answer for another", f"{ORDER}[world 2]")
def wrong_rank_answers(mode: DispatchMode) -> DispatchMode:
    def collect(call: Call, answers: Mapping[int, Any]) -> Any:
        ranks = sorted(answers)
        return mode.collect(call, dict(zip(ranks, [answers[rank] for rank in reversed(ranks)], strict=True)))

    return attrs.evolve(mode, collect=collect)


@mode_fault("gives the last rank rows of the first too", "test_every_row_reaches_the_ranks_that_share_it_once[world 2]")
def works_twice(mode: DispatchMode) -> DispatchMode:
    def overlap(call: Call, calls: Sequence[RankCall | None]) -> list[RankCall | None]:
        first, last = calls[0], calls[-1]
        if first is None or last is None or not (last.args and isinstance(last.args[0], TensorDictBase)):
            return list(calls)
        both = concat([last.args[0], first.args[0]])
        return [*calls[:-1], attrs.evolve(last, args=(both, *last.args[1:]))]

    return dealt(mode, overlap)


@mode_fault("takes a column out of the caller's batch", "test_the_callers_batch_stays_as_it_was")
def takes_a_column(mode: DispatchMode) -> DispatchMode:
    def take(call: Call, calls: Sequence[RankCall | None]) -> Sequence[RankCall | None]:
        for value in call.arguments.args:
            if isinstance(value, TensorDict):
                del value["tokens"]
        return calls

    return dealt(mode, take)


@mode_fault("drops keyword arguments", "test_positional_and_keyword_arguments_are_dealt_alike")
def drops_keywords(mode: DispatchMode) -> DispatchMode:
    def drop(call: Call, calls: Sequence[RankCall | None]) -> list[RankCall | None]:
        return [
            each and attrs.evolve(each, kwargs={k: v for k, v in each.kwargs.items() if k == "batch"}) for each in calls
        ]

    return dealt(mode, drop)


@mode_fault("ignores PerRank", "test_a_per_rank_argument_gives_each_rank_its_own_value")
def ignores_per_rank(mode: DispatchMode) -> DispatchMode:
    def ignore(call: Call, calls: Sequence[RankCall | None]) -> list[RankCall | None]:
        as_given = any(isinstance(value, PerRank) for value in call.arguments.args)
        return [each and attrs.evolve(each, args=call.arguments.args) if as_given else each for each in calls]

    return dealt(mode, ignore)


@mode_fault("gives each rank the PerRank value of its neighbour", "test_a_per_rank_argument_gives_each_rank_its_own")
def shifts_per_rank(mode: DispatchMode) -> DispatchMode:
    def shift(call: Call, calls: Sequence[RankCall | None]) -> list[RankCall | None]:
        if not any(isinstance(value, PerRank) for value in call.arguments.args):
            return list(calls)
        return [*calls[1:], calls[0]]

    return dealt(mode, shift)


@mode_fault("takes a PerRank of any length", "test_a_per_rank_argument_of_another_length_is_refused")
def takes_any_length(mode: DispatchMode) -> DispatchMode:
    def dispatch(call: Call) -> Any:
        def cut(value: Any) -> Any:
            return PerRank(value.values[: call.world_size]) if isinstance(value, PerRank) else value

        arguments = call.arguments.signature.bind(*map(cut, call.arguments.args), **call.arguments.kwargs)
        return mode.dispatch(attrs.evolve(call, arguments=arguments))

    return attrs.evolve(mode, dispatch=dispatch)


@mode_fault("leaves a mark in an argument", "test_what_a_rank_does_to_an_argument_no_other_rank_and_no_caller_sees")
def marks_arguments(mode: DispatchMode) -> DispatchMode:
    def mark(call: Call, calls: Sequence[RankCall | None]) -> Sequence[RankCall | None]:
        for value in call.arguments.args:
            if isinstance(value, list):
                value.append("seen")
        return calls

    return dealt(mode, mark)


@mode_fault(
    "gives what is no batch to the first rank alone", "test_what_is_no_batch_reaches_every_rank_that_runs[world 2]"
)
def keeps_values(mode: DispatchMode) -> DispatchMode:
    def keep(call: Call, calls: Sequence[RankCall | None]) -> list[RankCall | None]:
        if any(isinstance(value, TensorDictBase) for value in call.arguments.args):
            return list(calls)
        return [each if rank == 0 else each and RankCall() for rank, each in enumerate(calls)]

    return dealt(mode, keep)


def not_a_mode(backend: Backend) -> Backend:
    return with_manifest(backend, factory=dict)


NOT_A_MODE = Mutant("is no DispatchMode", ("test_its_factory_is_a_dispatch_mode",), entry=not_a_mode)
