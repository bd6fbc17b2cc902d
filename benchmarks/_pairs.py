"""Timing ours against a floor: interleaved pairs, and the ratio with its 95 % interval.

The two are run in turns, so that a machine that grows slower or faster during the run moves both. The ratio is the
median of the pairs' ratios; its interval goes from one order statistic to another (the sign test's, which asks nothing
of the distribution: of 15 pairs the 4th smallest and 4th largest ratio, which hold the median in 96.5 % of all runs).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from math import comb
from statistics import median

import attrs

from core.errors import Refused


@attrs.frozen
class Case:
    """Times in ms are medians. A ratio above 1 says that ours is slower than the floor."""

    name: str
    floor_ms: float
    ours_ms: float
    ratio: float
    low: float
    high: float


def measure(name: str, floor: Callable[[], object], ours: Callable[[], object], pairs: int = 15) -> Case:
    """Run both once to warm up, then `pairs` times in turns, each first in every other pair.

    Raises:
        Refused: of fewer than 6 pairs there is no 95 % interval.
    """
    if pairs < 6:
        raise Refused("too few pairs for a 95 % interval", have=pairs, want="at least 6, 15 for a claim")
    _seconds(floor)
    _seconds(ours)
    floors, times = [], []
    for pair in range(pairs):
        if pair % 2:
            times.append(_seconds(ours))
            floors.append(_seconds(floor))
        else:
            floors.append(_seconds(floor))
            times.append(_seconds(ours))
    ratios = sorted(mine / base for mine, base in zip(times, floors, strict=True))
    skip = _outside(pairs)
    low, high = ratios[skip], ratios[-1 - skip]
    return Case(name, 1e3 * median(floors), 1e3 * median(times), median(ratios), low, high)


def _outside(pairs: int) -> int:
    """How many order statistics lie outside the interval on each side: the most that leave 95 % between them."""
    skip, tail = 0, 0.5**pairs
    while tail + comb(pairs, skip + 1) * 0.5**pairs <= 0.025:
        skip += 1
        tail += comb(pairs, skip) * 0.5**pairs
    return skip


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def report(cases: Iterable[Case], as_json: bool) -> None:
    """Print a table, or `{"cases": [{"name", "floor_ms", "ours_ms", "ratio", "low", "high"}]}`."""
    cases = list(cases)
    if as_json:
        print(json.dumps({"cases": [attrs.asdict(case) for case in cases]}, indent=2))
        return
    width = max(len(case.name) for case in cases)
    print(f"{'case':{width}}  {'floor ms':>10}  {'ours ms':>10}  {'ratio':>7}  95 % interval")
    for case in cases:
        times = f"{case.floor_ms:10.2f}  {case.ours_ms:10.2f}  {case.ratio:7.3f}"
        print(f"{case.name:{width}}  {times}  {case.low:.3f} .. {case.high:.3f}")
