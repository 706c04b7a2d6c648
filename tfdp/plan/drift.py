"""Who holds another value than the others, told from hashes. Pure.

A variable is kept alike by several holders: the replicas of all hosts, or those that
train together. Where more than half of them have one value, the others have drifted;
else nobody can say who is right.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Holding:
    """What one replica holds of one variable.

    Args:
      variable: its name.
      kept_with: holders of a variable with the same number here keep it alike.
      rank: the replica, among those of all hosts.
      hash: of its bits.
    """

    variable: str
    kept_with: int
    rank: int
    hash: int


@dataclasses.dataclass(frozen=True)
class Drift:
    """A variable that not all of its holders have alike.

    Args:
      variable: its name.
      ranks: of the replicas that drifted; where no value has a majority, of all
        holders.
      holders: how many keep it alike.
      is_known: whether a majority says who is right.
    """

    variable: str
    ranks: tuple[int, ...]
    holders: int
    is_known: bool


def find_drifts(holdings: Sequence[Holding]) -> list[Drift]:
    """Every variable that its holders have not alike, in the order they came.

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
