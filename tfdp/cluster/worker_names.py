"""Names of workers in messages."""

from __future__ import annotations

from collections.abc import Sequence


def name_workers(ranks: Sequence[int]) -> str:
    """Names workers by rank; a long run becomes "first to last".

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
    names: list[str] = []
    for run in runs:
        is_long = len(run) >= 4  # shorter ones are listed rank by rank
        names += [f"{run[0]} to {run[-1]}"] if is_long else map(str, run)
    return f"worker{'s' * (len(ranks) > 1)} {', '.join(names)}"
