"""Which replica updates which matrix, where an optimizer needs whole ones. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


def newton_schulz_cost(shape: Sequence[int]) -> int:
    """m n min(m, n): what Muon's update of an m x n matrix costs, up to a factor.

    >>> newton_schulz_cost((512, 128)), newton_schulz_cost((1000,))
    (8388608, 1000)
    """
    return math.prod(shape) * (min(shape) if len(shape) == 2 else 1)


def assign_owners(costs: Sequence[int], loads: list[int]) -> list[int]:
    """The owner of each tensor: the largest first, each to the part with least to do.

    Longest processing time first: the largest load is at most 4/3 - 1/(3 N) of the
    least possible (Graham 1969). Ties go to the first, so all hosts agree.

    Args:
      costs: of the update of each tensor.
      loads: what each part has to do already; increased by what it gets.

    >>> assign_owners([2, 7, 3, 3], [0, 0])
    [1, 0, 1, 1]
    """
    owners = [0] * len(costs)
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        owner = owners[place] = loads.index(min(loads))
        loads[owner] += costs[place]
    return owners
