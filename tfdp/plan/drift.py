"""Finds replicas with a different value of a variable, by hashes. Pure.

Several holders keep a variable equal: the replicas of all hosts, or those of a group.
Where more than half of them have one value, the others have drifted; otherwise it is
unknown which value is right.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Holding:
    """One replica's copy of one variable; `hash` is of its bits.

    Holders with the same `kept_with` keep the variable equal.
    """

    variable: str
    kept_with: int
    rank: int
    hash: int


@dataclasses.dataclass(frozen=True)
class Drift:
    """A variable with different values on its holders.

    `ranks` drifted; without a majority (`is_known`) they are all holders.
    """

    variable: str
    ranks: tuple[int, ...]
    holders: int
    is_known: bool


def find_drifts(holdings: Sequence[Holding]) -> list[Drift]:
    """Every variable with different values on its holders, in the order of `holdings`.

    >>> held = [Holding("kernel", 0, rank, 7 if rank != 2 else 8) for rank in range(4)]
    >>> find_drifts(held)
    [Drift(variable='kernel', ranks=(2,), holders=4, is_known=True)]
    >>> find_drifts(held[1:3])
    [Drift(variable='kernel', ranks=(1, 2), holders=2, is_known=False)]
    """
    together: dict[tuple[str, int], list[Holding]] = {}
    for held in holdings:
        together.setdefault((held.variable, held.kept_with), []).append(held)
    found = []
    for (variable, _), holders in together.items():
        counts = collections.Counter(held.hash for held in holders)
        if len(counts) == 1:
            continue
        (value, count) = counts.most_common(1)[0]
        is_known = 2 * count > len(holders)
        ranks = [h.rank for h in holders if not (is_known and h.hash == value)]
        found.append(Drift(variable, tuple(sorted(ranks)), len(holders), is_known))
    return found
