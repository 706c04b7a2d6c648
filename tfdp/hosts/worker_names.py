"""Workers in words."""

from __future__ import annotations

from collections.abc import Sequence

# Fewer in a row are said one by one.
LEAST_RUN = 4


def name_workers(ranks: Sequence[int]) -> str:
    """Names workers by their ranks, long runs by their ends.

    >>> name_workers([1])
    'worker 1'
    >>> name_workers([1, 3, 8, 9, 10, 11, 12])
    'workers 1, 3, 8 to 12'
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words: list[str] = []
    for run in runs:
        is_long = len(run) >= LEAST_RUN
        words += [f"{run[0]} to {run[-1]}"] if is_long else map(str, run)
    return f"worker{'s' * (len(ranks) > 1)} {', '.join(words)}"
