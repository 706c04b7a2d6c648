"""Time spans (from, to), and operations on sorted lists of disjoint spans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Span = tuple[float, float]


def joined(spans: Iterable[Span]) -> list[Span]:
    """The union, sorted and disjoint; a span that ends before it begins is empty.

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
    """The total length of disjoint spans."""
    return sum(stop - start for start, stop in spans)


def both(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """The intersection of two sorted, disjoint lists.

    >>> both([(0, 3), (4, 6)], [(2, 5)])
    [(2, 3), (4, 5)]
    """
    return without(first, without(first, second))


def without(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """The difference of two sorted, disjoint lists.

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
