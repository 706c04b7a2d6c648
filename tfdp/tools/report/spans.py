"""Stretches of time: what they cover together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["Span", "both", "covered", "joined", "length", "without"]

# From, to.
Span = tuple[float, float]


def joined(spans: Iterable[Span]) -> list[Span]:
    """The union, in order and apart; spans that end before they begin are empty.

    >>> joined([(4, 6), (0, 2), (1, 3), (9, 8)])
    [(0, 3), (4, 6)]
    """
    union: list[Span] = []
    for start, stop in sorted(spans):
        if stop <= start:
            continue
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], stop)
        else:
            union.append((start, stop))
    return union


def length(spans: Iterable[Span]) -> float:
    """Of spans that are apart, together."""
    return sum(stop - start for start, stop in spans)


def covered(spans: Iterable[Span]) -> float:
    """The length of the union of spans.

    >>> covered([(4, 6), (0, 2), (1, 3), (9, 8)])
    5
    """
    return length(joined(spans))


def both(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """What is in one and in the other; each in order and apart.

    >>> both([(0, 3), (4, 6)], [(2, 5)])
    [(2, 3), (4, 5)]
    """
    found: list[Span] = []
    mine = theirs = 0
    while mine < len(first) and theirs < len(second):
        start = max(first[mine][0], second[theirs][0])
        stop = min(first[mine][1], second[theirs][1])
        if start < stop:
            found.append((start, stop))
        if first[mine][1] < second[theirs][1]:
            mine += 1
        else:
            theirs += 1
    return found


def without(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """What is in the first and not in the second; each in order and apart.

    >>> without([(0, 3), (4, 6)], [(2, 5)])
    [(0, 2), (5, 6)]
    """
    found: list[Span] = []
    place = 0
    for start, stop in first:
        while place < len(second) and second[place][1] <= start:
            place += 1
        here = place
        while here < len(second) and second[here][0] < stop:
            if second[here][0] > start:
                found.append((start, second[here][0]))
            start = max(start, second[here][1])
            here += 1
        if start < stop:
            found.append((start, stop))
    return found
