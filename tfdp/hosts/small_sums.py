"""Sums in few rounds, of what is too short for a ring to pay.

    gather     everybody's numbers to everybody, who adds all of them
    doubling   everybody's part q to worker q, who adds it; the sums to everybody

Either adds as a ring does (`tfdp.hosts.ring`): part q begins with worker q's numbers,
to which those of q + 1, q + 2 ... are added, one after the other. So every worker gets
the bits that a ring gives, whichever way a sum takes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np

from tfdp.hosts.doubling import End, gather_rows, leaving, swap_rows
from tfdp.hosts.rounded_wire import part_edges

__all__ = ["SmallSum"]

# Up to here one call that is slow for each number beats a call for each row.
MOST_ACCUMULATED = 1 << 13


class SmallSum:
    """One sum of flat arrays, in the few rounds of `way`.

    Args:
      way: "gather" or "doubling".
      inputs: flat arrays of one dtype; not changed.
      rank, workers: this worker; how many there are.
    """

    def __init__(self, way: str, inputs: Sequence[np.ndarray], rank: int, workers: int):
        self._way = way
        self._rank = rank
        self._workers = workers
        self._flat = inputs[0] if len(inputs) == 1 else np.concatenate(inputs)
        if way == "gather":
            self._rows = np.empty((workers, self._flat.size), self._flat.dtype)
            self._rows[0] = self._flat
            #: What the first round sends; it can go before the others are known here.
            self.first = self._rows[:1]
        else:
            # Parts differ by one number; what fills up is 0 and is thrown away.
            longest = -(-self._flat.size // workers)
            self._rows = np.zeros((workers, longest), self._flat.dtype)
            for part, start, stop in self._parts():
                row = (part - rank) % workers  # for the worker so far after
                self._rows[row, : stop - start] = self._flat[start:stop]
            self.first = self._rows[leaving(workers, 1)]

    def _parts(self) -> Iterator[tuple[int, int, int]]:
        edges = part_edges(self._flat.size, self._workers)
        return zip(range(self._workers), edges[:-1], edges[1:], strict=True)

    def run(self, outputs: Sequence[np.ndarray], ends: Sequence[End]) -> None:
        """Writes the sums into `outputs`, once `first` has been sent.

        Args:
          outputs: flat, shaped as the inputs.
          ends: see `tfdp.hosts.doubling`.
        """
        # Loss scaling looks for infinities; a warning for each would bury others.
        with np.errstate(over="ignore", invalid="ignore"):
            total = self._gathered(ends) if self._way == "gather" else self._met(ends)
        start = 0
        for output in outputs:
            output[...] = total[start : start + output.size]
            start += output.size

    def _gathered(self, ends: Sequence[End]) -> np.ndarray:
        gather_rows(self._rows, ends, begun=True)
        order = order_of_adding(self._flat.size, self._rank, self._workers)
        return added(self._rows.reshape(-1)[order])

    def _met(self, ends: Sequence[End]) -> np.ndarray:
        came = swap_rows(self._rows, ends, begun=True)
        # Row d is of the worker d places before: the one after is the last row.
        rows = np.empty_like(came)
        rows[0] = added(np.concatenate([came[:1], came[:0:-1]]))
        gather_rows(rows, ends)
        sums = np.empty_like(self._flat)
        for part, start, stop in self._parts():
            row = (self._rank - part) % self._workers  # of the worker so far before
            sums[start:stop] = rows[row, : stop - start]
        return sums


def added(rows: np.ndarray) -> np.ndarray:
    """The sum of the rows, one after the other; NumPy's `sum` may add in pairs."""
    if rows.size <= MOST_ACCUMULATED:
        return np.add.accumulate(rows, axis=0, dtype=rows.dtype)[-1]
    total = rows[0].copy()
    for row in rows[1:]:
        total += row
    return total


@functools.lru_cache(maxsize=8)
def order_of_adding(size: int, rank: int, workers: int) -> np.ndarray:
    """Where the numbers stand that are added up, [workers, size], the first one first.

    Places in flat rows of `size` numbers by distance: those of this worker, of the
    worker before it, and so on.

    >>> order_of_adding(4, rank=1, workers=2)
    array([[4, 5, 2, 3],
           [0, 1, 6, 7]])
    """
    starts = part_edges(size, workers)[1:]
    parts = np.searchsorted(starts, np.arange(size), side="right")
    sources = parts + np.arange(workers)[:, np.newaxis]
    return (rank - sources) % workers * size + np.arange(size)
