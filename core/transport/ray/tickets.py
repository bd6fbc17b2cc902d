"""Calls under way on Ray's actors, and what becomes of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, RayTaskError, WorkerCrashedError

from core._run.transport import Answered, BadlyAnswered, Died, Outcome, Raised, RefusedIt
from core.errors import BadAnswer

# After the first failure: time for the root cause to arrive, where a peer's error was faster.
SETTLE_S = 0.4
# After a refusal: the others must find the same without waiting for anybody. They get as long again as it has taken so
# far, and this at least: ranks that read a slow disk refuse one after another.
REFUSAL_GRACE_S = 10.0


class NoAnswer(Exception):
    """Carries an outcome that is no answer: of an exception Ray tells the driver before the other ranks have ended."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


def sent(outcome: Outcome) -> Any:
    if isinstance(outcome, Answered):
        return outcome.value
    raise NoAnswer(outcome)


class RayTicket:
    """Calls under way on actors.

    Args:
        running: methods run, so that what Ray itself cannot send is an answer.
    """

    def __init__(self, references: Mapping[int, Any], *, running: bool = False) -> None:
        self.ranks = frozenset(references)
        self._references, self._running = dict(references), running

    def done(self) -> bool:
        references = list(self._references.values())
        ready, _ = ray.wait(references, num_returns=len(references), timeout=0)
        return len(ready) == len(references)

    def gather(self, timeout_s: float) -> dict[int, Outcome]:
        began = time.monotonic()
        with suppress(Exception):  # of whatever kind: below it is looked at rank by rank
            values = ray.get(list(self._references.values()), timeout=timeout_s)
            return {rank: Answered(value) for rank, value in zip(self._references, values, strict=True)}
        return self._gather_each(began, timeout_s)

    def _gather_each(self, began: float, timeout_s: float) -> dict[int, Outcome]:
        limit = deadline = began + timeout_s
        rank_of = {reference: rank for rank, reference in self._references.items()}
        waiting = list(rank_of)
        outcomes: dict[int, Outcome] = {}
        while waiting:
            remaining_s = deadline - time.monotonic()
            ready, _ = ray.wait(waiting, num_returns=1, timeout=max(remaining_s, 0))
            if not ready:
                break
            if len(waiting) > 1:
                ready, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
            for reference in ready:
                outcome = outcomes[rank_of[reference]] = _outcome(reference, self._running)
                now = time.monotonic()
                if isinstance(outcome, RefusedIt):
                    deadline = min(limit, now + max(REFUSAL_GRACE_S, now - began))
                elif not isinstance(outcome, Answered | BadlyAnswered):
                    limit = min(limit, now + SETTLE_S)
                    deadline = min(deadline, limit)
            waiting = [reference for reference in waiting if rank_of[reference] not in outcomes]
        return outcomes


def _outcome(reference: Any, running: bool) -> Outcome:
    try:
        return Answered(ray.get(reference))
    except RayActorError as error:
        return Died(_how_it_ended(str(error)))
    except RayTaskError as error:  # outside the host's own guard
        cause = error.cause if isinstance(error.cause, BaseException) else None
        if isinstance(cause, NoAnswer):
            return cause.outcome
        text = f"{type(cause or error).__name__}: {cause or error}"
        if running:
            return BadlyAnswered(_unreadable(text, "values that can be pickled"))
        return Raised(text, str(error), time.time())
    except (WorkerCrashedError, NodeDiedError, ObjectLostError) as error:
        return Died(f"{type(error).__name__}: {error}")
    except Exception as error:
        return BadlyAnswered(_unreadable(f"{type(error).__name__}: {error}", "values of classes that the driver has"))


def _unreadable(text: str, want: str) -> BadAnswer:
    return BadAnswer("an answer cannot be sent to the driver", have=text, want=want)


def _how_it_ended(text: str) -> str:
    """The lines of Ray's message that say how the process ended."""
    lines = [line.strip() for line in text.splitlines()]
    reasons = [line for line in lines if "exit" in line.lower() or "died" in line.lower()]
    return " ".join(reasons[:3]) or lines[0]
