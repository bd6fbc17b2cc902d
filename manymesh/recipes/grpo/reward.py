"""Rewards: calling a user's function by its name, checking what it returns, and two functions that are
ready to use.

A reward function is called once a step with all completions:

    def reward(completions: list[str], rows: list[Mapping[str, Any]], **options) -> list[float]

`rows[i]` is the line of the JSONL file whose prompt gave `completions[i]`; options come from
`reward.options`.
"""

from __future__ import annotations

import importlib
import inspect
import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from core.errors import ConfigError, Refused, did_you_mean

Row = Mapping[str, Any]
RewardFn = Callable[..., Iterable[float]]


class RewardError(Refused):
    """A reward function that raised, or whose result cannot be trained on. Nothing of the step has been
    applied."""


@attrs.frozen
class RewardConfig:
    function: str = "manymesh.recipes.grpo.reward:exact_match"  # "module:function"
    options: dict[str, Any] = attrs.field(factory=dict)  # keyword arguments of each call


def exact_match(completions: Sequence[str], rows: Sequence[Row], *, field: str = "answer") -> list[float]:
    """1 where the completion is the row's field, white space at the ends aside, else 0."""
    return [
        float(completion.strip() == str(row[field]).strip()) for completion, row in zip(completions, rows, strict=True)
    ]


def digit_share(completions: Sequence[str], rows: Sequence[Row], *, field: str = "answer") -> list[float]:
    """Share of digits that are right, place by place: 0 to 1. Whatever is no digit doesn't count.

    The longer of completion and field is the denominator, so digits too many cost as much as digits too few.
    """
    return [_digit_share(text, str(row[field])) for text, row in zip(completions, rows, strict=True)]


def _digit_share(text: str, answer: str) -> float:
    have, want = [c for c in text if c.isdigit()], [c for c in answer if c.isdigit()]
    return sum(a == b for a, b in zip(have, want, strict=False)) / max(len(have), len(want), 1)


@attrs.frozen
class Reward:
    """A reward function under its name, with its options bound and its results checked."""

    name: str
    function: RewardFn
    options: Mapping[str, Any] = attrs.field(factory=dict)

    @classmethod
    def load(cls, config: RewardConfig) -> Reward:
        """Import the function.

        Raises:
            ConfigError: not 'module:function', no such module or function, it can't be called so, or its
            module fails.
        """
        where = "reward.function"
        module_name, colon, name = config.function.partition(":")
        if not (colon and module_name and name):
            raise ConfigError(
                "a reward function is named 'module:function'",
                have=repr(config.function),
                want="for example 'manymesh.recipes.grpo.reward:exact_match'",
                where=where,
            )
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            raise ConfigError(
                f"cannot import the reward module {module_name!r}",
                have=f"{type(error).__name__}: {error}",
                where=where,
                mend="install it, or start in the directory that holds it",
            ) from error
        function = getattr(module, name, None)
        if not callable(function):
            names = [n for n, v in vars(module).items() if inspect.isfunction(v) and not n.startswith("_")]
            raise ConfigError(
                f"module {module_name!r} has no function {name!r}", where=where, mend=did_you_mean(name, names)
            )
        try:
            inspect.signature(function).bind([], [], **config.options)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{config.function} cannot be called as reward(completions, rows, **options)",
                have=f"{error}; options {config.options}",
                where=where,
                mend="see reward.options",
            ) from error
        return cls(config.function, function, config.options)

    def __call__(self, completions: Sequence[str], rows: Sequence[Row]) -> list[float]:
        """A finite float for every completion.

        Raises:
            RewardError: the function raised, or returned another number of values, or one that is no finite
            number.
        """
        try:
            result = self.function(completions, rows, **self.options)
        except Exception as error:
            raise self._locate(error, completions, rows) from error
        values = list(result) if isinstance(result, Iterable) else []
        if len(values) != len(completions):
            raise RewardError(
                f"reward function {self.name} returned a wrong number of rewards",
                have=len(values) if isinstance(result, Iterable) else repr(result),
                want=f"{len(completions)}, one for each completion",
                where=self.name,
            )
        rewards = [_number_or_nan(value) for value in values]
        for i, value in enumerate(rewards):
            if not math.isfinite(value):
                raise self._error("returned no finite number", i, completions, rows, have=repr(values[i]))
        return rewards

    def _locate(self, error: Exception, completions: Sequence[str], rows: Sequence[Row]) -> RewardError:
        # The function saw all completions at once: asked again one by one, it usually shows which one it was.
        frame = traceback.extract_tb(error.__traceback__)[-1]
        have = f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
        for i in range(len(completions)):
            try:
                self.function(completions[i : i + 1], rows[i : i + 1], **self.options)
            except Exception:
                return self._error("raised", i, completions, rows, have=have)
        return RewardError(
            f"reward function {self.name} raised on {len(completions)} completions, though on none alone",
            have=have,
            where=self.name,
        )

    def _error(self, did: str, i: int, completions: Sequence[str], rows: Sequence[Row], *, have: str) -> RewardError:
        return RewardError(
            f"reward function {self.name} {did} at row {i} of the batch",
            have=have,
            want="a finite number for every completion",
            where=f"row {_short(dict(rows[i]))}, completion {_short(completions[i])}",
            mend="mend the function, then start again, with --resume where there is a checkpoint",
        )


def _number_or_nan(value: object) -> float:
    if isinstance(value, str):
        return math.nan
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan


def _short(value: object, limit: int = 300) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
