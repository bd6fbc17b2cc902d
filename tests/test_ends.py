"""How waits end: what a shutdown reports, and how long ranks may take to refuse one after another."""

from __future__ import annotations

import logging
from typing import Any

import attrs
import pytest

from core.dispatch import register
from core.errors import Refused
from core.group import RayClassWithInitArgs
from core.transport import Answered, Outcome, Raised, RefusedIt
from core.transport.local import LocalWorkerGroup
from core.transport.ray import tickets
from core.worker import Worker


class Ends(Worker):
    def __init__(self, how: str = "well") -> None:
        self.how = how

    @register()
    def nothing(self) -> None: ...

    def shutdown(self) -> None:
        if self.rank == 1 and self.how == "raises":
            raise OSError("No space left on device")
        if self.how == "refuses":
            raise Refused("the checkpoint of step 7 could not be written", have="No space left on device")


def ended(how: str, caplog: pytest.LogCaptureFixture, **options: Any) -> list[str]:
    caplog.clear()
    group = LocalWorkerGroup(RayClassWithInitArgs(Ends, how), world_size=2, name="writers")
    with caplog.at_level(logging.WARNING, logger="manymesh"):
        group.shutdown(**options)
        group.shutdown(**options)  # nothing is told twice
    return [record.getMessage() for record in caplog.records]


def test_a_shutdown_reports_workers_that_raised_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    assert ended("well", caplog) == []
    (said,) = ended("raises", caplog)
    assert "rank 1 of group 'writers' raised OSError: No space left on device" in said
    assert "method 'shutdown'" in said
    (said,) = ended("refuses", caplog)
    assert "the checkpoint of step 7 could not be written" in said
    assert ended("raises", caplog, report=False) == []


def test_a_shutdown_reports_workers_that_did_not_answer_in_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    @attrs.frozen
    class Slow:
        ranks: frozenset[int] = frozenset({0, 1})

        def gather(self, timeout_s: float) -> dict[int, Outcome]:
            return {0: Answered(None)}

    group = LocalWorkerGroup(Ends, world_size=2, name="writers")
    monkeypatch.setattr(group._transport, "shutdown", Slow)
    with caplog.at_level(logging.WARNING, logger="manymesh"):
        group.shutdown(timeout_s=3)
    assert "ranks [1] of group 'writers' did not answer 'shutdown' within 3 s" in caplog.text


def test_an_error_on_its_way_is_not_hidden_behind_a_report(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ZeroDivisionError), LocalWorkerGroup(RayClassWithInitArgs(Ends, "raises"), world_size=2):
        raise ZeroDivisionError
    assert caplog.records == []


# ---------------------------------------------------------------------------------------------- refusals on Ray


def gathered(
    monkeypatch: pytest.MonkeyPatch, ends: dict[int, tuple[float, Outcome]], timeout_s: float = 7200.0
) -> tuple[list[int], float]:
    """Ranks whose outcome was waited for, and how long that took, where each rank ends at a time with an outcome.

    Time is made up, and so are Ray's answers.
    """
    now = [0.0]

    class FakeRay:
        @staticmethod
        def get(references: list[int], timeout: float) -> Any:
            now[0] += min([timeout, *(at for at, outcome in ends.values() if not isinstance(outcome, Answered))])
            raise RuntimeError("a rank has no answer")

        @staticmethod
        def wait(references: list[int], num_returns: int, timeout: float) -> tuple[list[int], list[int]]:
            first = sorted(ends[rank][0] for rank in references)[num_returns - 1]
            now[0] += min(max(first - now[0], 0), timeout)
            ready = [rank for rank in references if ends[rank][0] <= now[0]]
            return ready, [rank for rank in references if rank not in ready]

    monkeypatch.setattr(tickets, "ray", FakeRay)
    monkeypatch.setattr("core.transport.ray.tickets.time.monotonic", lambda: now[0])
    monkeypatch.setattr(tickets, "_outcome", lambda rank, running: ends[rank][1])
    return sorted(tickets.RayTicket({rank: rank for rank in ends}).gather(timeout_s)), now[0]


NO = RefusedIt(Refused("no such option"))
BOOM = Raised("ValueError: boom", "", 0.0)


@pytest.mark.parametrize(
    ("ends", "timeout_s", "ranks", "seconds"),
    [
        # Engines read a slow disk before they refuse, one after another: each refusal gives the others more time.
        ({0: (60, NO), 1: (115, NO), 2: (200, NO)}, 7200, [0, 1, 2], 200),
        ({0: (1, NO), 1: (9, NO), 2: (18, NO)}, 7200, [0, 1, 2], 18),
        # A rank that waits for those that refused never ends.
        ({0: (1, NO), 1: (9000, NO)}, 7200, [0], 11),
        ({0: (60, NO), 1: (9000, NO)}, 7200, [0], 120),
        ({0: (60, NO), 1: (9000, NO)}, 100, [0], 100),
        # A failure ends the wait soon, whoever refuses before or after it.
        ({0: (60, NO), 1: (61, BOOM), 2: (9000, NO)}, 7200, [0, 1], 61.4),
        ({0: (60, BOOM), 1: (60.2, NO), 2: (9000, NO)}, 7200, [0, 1], 60.4),
    ],
)
def test_ranks_that_refuse_one_after_another_get_as_long_again_as_it_took_so_far(
    monkeypatch: pytest.MonkeyPatch,
    ends: dict[int, tuple[float, Outcome]],
    timeout_s: float,
    ranks: list[int],
    seconds: float,
) -> None:
    heard, took = gathered(monkeypatch, ends, timeout_s)
    assert heard == ranks
    assert took == pytest.approx(seconds)
