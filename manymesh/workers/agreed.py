"""A dispatch mode for calls that every rank must answer alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.dispatch import Call, Dispatch, DispatchMode
from core.errors import Refused


def _one(call: Call, answers: Mapping[int, Any]) -> Any:
    if any(answer != answers[0] for answer in answers.values()):
        raise Refused("the ranks don't agree", have=dict(answers), want="one answer", where=call.where)
    return answers[0]


AGREED = DispatchMode("AGREED", Dispatch.ONE_TO_ALL.dispatch, _one)
"""The same arguments to every rank; the one value that they all answered."""
