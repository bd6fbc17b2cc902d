"""The dispatch modes' suite: manifest, and what becomes of arguments, rows and answers."""

from __future__ import annotations

from sdk.conformance.suites.dispatch import DispatchSuite
from sdk.conformance.suites.manifest import ListedSuite


class DispatchModeConformance(DispatchSuite, ListedSuite):
    """Any dispatch mode, on groups of ranks in this process.

    Attributes:
        deals_rows: batches are dealt by row, and the result has the caller's rows in the caller's order. Where it is
            False the tests of rows are closed.
    """
