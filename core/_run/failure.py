"""Which of several ranks' failures is the cause, and the error that says so."""

from __future__ import annotations

import pickle
from contextlib import suppress
from typing import Any

from core._run.transport import Answered, BadlyAnswered, Died, Outcome, Raised, RefusedIt, Ticket, Transport
from core.errors import DeadlineExceeded, ManymeshError, WorkerFailed


def explain(
    outcomes: dict[int, Outcome],
    late: list[int],
    group: str,
    transport: Transport,
    method: str,
    mesh: str | None,
    timeout_s: float,
    hint: str = "",
) -> ManymeshError:
    """The error of a call that not all ranks answered.

    Args:
        late: ranks that have no outcome at the deadline.
        hint: what else may mend it.
    """
    bad = {rank: each for rank, each in outcomes.items() if not isinstance(each, Answered | BadlyAnswered)}
    if not bad:
        return DeadlineExceeded(
            f"ranks {late} of group {group!r} did not answer {method!r} within {timeout_s:g} s",
            where=f"group {group!r}, method {method!r}",
            mend="the group has been ended; give the method a longer timeout_s if it is healthy but slow",
        )
    rank = min(bad, key=lambda rank: (_blame(transport, rank, bad[rank]), rank))
    first: Any = bad[rank]
    identity = transport.identities[rank]
    details: dict[str, str] = {}
    cause: BaseException | None = None
    mend = "the group's other ranks have been ended; build a new group"
    mend += f"; {hint}" if hint else ""
    match first:
        case Raised():
            what, cause = f"rank {rank} of group {group!r} raised {first.summary}", _unpickle(first.error)
            details = {"traceback": first.traceback}
        case RefusedIt():
            some = sorted(r for r, each in bad.items() if isinstance(each, RefusedIt))
            what, cause = f"only ranks {some} of group {group!r} refused: {first.error.message}", first.error
            details, mend = {"traceback": str(cause)}, f"a refusal must be found on all ranks alike; {mend}"
        case Died():
            what, details = f"the process of rank {rank} of group {group!r} died", {"exit": first.exit}
    error = WorkerFailed(
        what,
        group=group,
        rank=rank,
        node=identity.node_address,
        pid=identity.pid,
        method=method,
        mesh=mesh,
        log_tail=transport.log_tail(rank),
        mend=mend,
        **details,
    )
    error.__cause__ = cause
    return error


def explain_end(ticket: Ticket, group: str, transport: Transport, timeout_s: float) -> ManymeshError | None:
    """Wait for the workers' own shutdown; the error of it, or None where all have answered."""
    outcomes = ticket.gather(timeout_s)
    late = sorted(ticket.ranks - outcomes.keys())
    if not late and all(isinstance(each, Answered) for each in outcomes.values()):
        return None
    return explain(outcomes, late, group, transport, "shutdown", None, timeout_s)


def _blame(transport: Transport, rank: int, outcome: Outcome) -> tuple[int, float]:
    """Sorts who failed first to the front. When one process dies or raises, its peers' collectives fail too:
    gloo and nccl errors, and processes that they abort, come last."""
    match outcome:
        case Raised():
            return (2 if outcome.collective else 0), outcome.at
        case Died():
            aborted = any("Fatal Python error: Aborted" in line for line in transport.log_tail(rank))
            return (3 if aborted else 1), 0.0
        case _:
            return 2, 0.0


def _unpickle(error: bytes | None) -> BaseException | None:
    """A worker's exception, where the driver has its class too."""
    with suppress(Exception):
        exception = pickle.loads(error) if error else None
        return exception if isinstance(exception, BaseException) else None
    return None
