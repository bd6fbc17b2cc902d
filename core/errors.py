"""Errors that say what was given, what was expected, where, and how to correct it.

A call fails in one of three ways. Refused: before any side effect. BadAnswer: the workers have run, their answers are
unusable, the group is healthy. WorkerFailed: the group has ended.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class ManymeshError(Exception):
    """Base of all errors raised on purpose.

    Args:
        message: one sentence that stands by itself.
        have: what was found.
        want: what would have been right.
        where: mesh, method, rank, file or config path.
        mend: what to do about it.
    """

    def __init__(
        self, message: str, *, have: object = None, want: object = None, where: str = "", mend: str = ""
    ) -> None:
        self.message, self.have, self.want, self.where, self.mend = message, have, want, where, mend
        super().__init__(message)

    def __str__(self) -> str:
        lines = [self.message]
        for label in ("where", "have", "want", "mend"):
            value = getattr(self, label)
            if value is not None and value != "":
                lines.append(f"  {label}: {value}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions pickle by their positional args; ours are keywords.
        return type(self).__new__, (type(self),), {**self.__dict__, "args": self.args}


class Refused(ManymeshError):
    """A bad request, found before any side effect and on all ranks alike. A method that raises it has changed nothing.

    The group stays healthy: correct the request and call again.
    """


class ConfigError(Refused):
    """A configuration that cannot be structured: unknown key, wrong type or illegal value."""


class RegistryError(Refused):
    """A plugin that is unknown, ambiguous, broken, or that lacks what it requires."""


class BadAnswer(ManymeshError):
    """The workers have run and their state has changed, but what they answered cannot be joined or sent.

    Rows are missing, metrics that must be the same differ, widths are unequal, a value cannot be pickled. The group
    stays healthy. Calling again runs the method again: after `update_actor` that would be a second update.
    """

    @classmethod
    def of(cls, error: ManymeshError) -> BadAnswer:
        """What `error` says, of an answer."""
        return cls(error.message, have=error.have, want=error.want, where=error.where, mend=error.mend)


class WorkerFailed(ManymeshError):
    """A worker raised, or its process died. The group's other ranks have been ended and the group is failed.

    Attributes:
        group, rank, node, pid: who failed first.
        method, mesh: what it was doing (mesh is None where the method names none).
        exit: how the process ended, or None when it raised.
        traceback: the worker's own traceback, or None when the process died.
        log_tail: the last lines that the process wrote.
    """

    def __init__(
        self,
        message: str,
        *,
        group: str,
        rank: int,
        method: str,
        node: str = "?",
        pid: int = 0,
        mesh: str | None = None,
        exit: str | None = None,
        traceback: str | None = None,
        log_tail: tuple[str, ...] = (),
        mend: str = "",
    ) -> None:
        where = f"group {group!r}, rank {rank}, method {method!r}"
        where += f" on mesh {mesh!r}" if mesh else ""
        where += f", node {node}, pid {pid}"
        super().__init__(message, where=where, mend=mend)
        self.group, self.rank, self.node, self.pid = group, rank, node, pid
        self.method, self.mesh, self.exit = method, mesh, exit
        self.traceback, self.log_tail = traceback, log_tail

    def __str__(self) -> str:
        text = super().__str__()
        if self.exit:
            text += f"\n  exit: {self.exit}"
        if self.traceback:
            text += f"\n--- traceback of rank {self.rank} ---\n{self.traceback.rstrip()}"
        if self.log_tail:
            text += f"\n--- last log lines of rank {self.rank} ---\n" + "\n".join(self.log_tail)
        return text


class TransferFailed(ManymeshError):
    """Weights did not cross as a whole. The groups are healthy; the receivers have no valid weights, or their old ones
    where those are still whole. The next sync sends all again."""


class DeadlineExceeded(ManymeshError, TimeoutError):
    """A wait ran past its deadline. The message says what was waited for."""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """A sentence for `mend`: the nearest legal name, or all of them when none is near."""
    names = sorted(names)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"legal: {', '.join(names)}" if names else "there is none"
