"""What observers are told. They are handed to a group, `observers=[...]`, and take the arguments that they want."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from core.hookspecs import hookspec

if TYPE_CHECKING:
    from core._calls.calls import Call, Order, RankCall
    from core._run.host import WorkerHost
    from core._run.transport import Outcome


@hookspec
def manymesh_before_dispatch(call: Call) -> None:
    """On the driver, before a call's arguments are dealt: group, method, mesh and arguments are known."""


@hookspec
def manymesh_after_dispatch(call: Call, sent: Mapping[int, RankCall], seconds: float) -> None:
    """On the driver: the call is on its way. Ranks that share a RankCall get one object; `num_bytes` weighs.

    Args:
        seconds: since the call began.
    """


@hookspec
def manymesh_after_collect(
    call: Call, answers: Mapping[int, Any] | None, seconds: float, error: BaseException | None
) -> None:
    """On the driver: the answers, by rank, have been joined; or the call has failed with `error`."""


@hookspec
def manymesh_before_method(host: WorkerHost, order: Order, call: RankCall) -> None:
    """In a worker, before a method runs. The observer got there by pickling.

    Args:
        host: holds `worker`, `context` (rank, world size) and `made`: class, arguments and keyword arguments.
        call: the arguments, in the form that crosses between processes, and the shard.
    """


@hookspec
def manymesh_after_method(host: WorkerHost, order: Order, call: RankCall, outcome: Outcome, seconds: float) -> None:
    """In a worker, after a method has run or raised."""
