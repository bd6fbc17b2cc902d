"""Spreading weights over parts of equal count, so that the parts weigh nearly the same."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heappop, heapreplace

TOLERANCE = 1.01  # the heaviest part over the mean, from which on parts are balanced


def are_balanced(sums: Sequence[int]) -> bool:
    """Whether the heaviest of parts that weigh so much is near enough to the mean."""
    return max(sums) * len(sums) <= TOLERANCE * sum(sums)


def balanced_parts(weights: Sequence[int], num_parts: int) -> list[list[int]]:
    """Places in `weights`, in parts of near-equal weight whose counts differ by at most one.

    The heaviest place goes to the part that is the lightest so far and has room, then the next heaviest. So a part with
    one very heavy place gets the lightest ones beside it. What imbalance is left, which with few places a part can be a
    tenth, goes by exchanges of one place of the heaviest part for one of the lightest.
    """
    least, extra = divmod(len(weights), num_parts)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    sums = [0] * num_parts
    open_parts = [(0, part) for part in range(num_parts)]  # a heap
    for place in sorted(range(len(weights)), key=weights.__getitem__, reverse=True):
        while len(parts[open_parts[0][1]]) >= least + (extra > 0):
            heappop(open_parts)
        part = open_parts[0][1]
        parts[part].append(place)
        sums[part] += weights[place]
        extra -= len(parts[part]) > least
        heapreplace(open_parts, (sums[part], part))
    for _ in range(2 * num_parts):
        heaviest, lightest = (choose(range(num_parts), key=sums.__getitem__) for choose in (max, min))
        if are_balanced(sums):
            break
        change = _exchange(weights, parts[heaviest], parts[lightest], sums[heaviest] - sums[lightest])
        if not change:
            break
        sums[heaviest] -= change
        sums[lightest] += change
    return parts


def _exchange(weights: Sequence[int], heavy: list[int], light: list[int], gap: int) -> int:
    """Exchange two places so that the parts, which differ by `gap`, become as equal as possible.

    Returns:
        the weight that went from `heavy` to `light`; 0 where no exchange makes them more equal.
    """
    light.sort(key=weights.__getitem__)
    light_weights = [weights[place] for place in light]
    best = gap, 0, 0, 0  # what they would differ by, the weight moved, and where the two places are
    for i, place in enumerate(heavy):
        at = bisect_left(light_weights, weights[place] - gap / 2)
        for j in range(max(at - 1, 0), min(at + 1, len(light))):
            change = weights[place] - light_weights[j]
            best = min(best, (abs(gap - 2 * change), change, i, j))
    _, change, i, j = best
    if change:
        heavy[i], light[j] = light[j], heavy[i]
    return change
