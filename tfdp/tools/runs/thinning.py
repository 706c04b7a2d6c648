"""How many steps share a line: few lines for long runs, and none is ever rewritten."""

from __future__ import annotations

__all__ = ["LINES", "steps_of_line"]

#: Lines of each width; a run of a million steps has ten thousand.
LINES = 1000


def steps_of_line(made: int) -> int:
    """How many steps the next line holds: 1, after 1,000 lines 2, then 4 ...

    It goes by the number of steps alone, so the lines of all workers are of the same
    steps. A run of n steps has about 1000 log2(n / 1000) lines.

    Args:
      made: steps before it.

    >>> [steps_of_line(made) for made in (0, 999, 1000, 2999, 3000, 10**6)]
    [1, 1, 2, 2, 4, 512]
    """
    return 1 << ((made // LINES + 1).bit_length() - 1)
