"""Sums in few rounds, of what is too short for a ring to pay.

    gather     everybody's numbers to everybody, who adds all of them
    doubling   everybody's part q to worker q, who adds it; the sums to everybody

Either adds as a ring does (`tfdp.hosts.ring`): part q begins with worker q's numbers,
to which those of q + 1, q + 2 ... are added, one after the other. So every worker gets
the bits that a ring gives, whichever way a sum takes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from tfdp.hosts.doubling import End, gather_rows, leaving, swap_rows
from tfdp.hosts.rounded_wire import part_edges

__all__ = ["SmallSum"]


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
            # Twice: the order of any part is then one run of rows.
            rows = (2 * workers, self._flat.size)
            self._rows = np.empty(rows, self._flat.dtype)
            self._rows[0] = self._flat
            #: What the first round sends; it can go before the others are known here.
            self.first = self._rows[:1]
        else:
            self._rows = self._parts_by_distance()
            self.first = self._rows[leaving(workers, 1)]

    def _parts_by_distance(self) -> np.ndarray:
        """This worker's numbers; row d is the part of the worker d places after."""
        edges = part_edges(self._flat.size, self._workers)
        longest = -(-self._flat.size // self._workers)
        # Parts differ by one number; what fills up is 0 and is thrown away.
        rows = np.zeros((self._workers, longest), self._flat.dtype)
        for part in range(self._workers):
            own = self._flat[edges[part] : edges[part + 1]]
            rows[(part - self._rank) % self._workers, : own.size] = own
        return rows

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
        workers, size = self._workers, self._flat.size
        gather_rows(self._rows[:workers], ends, begun=True)
        self._rows[workers:] = self._rows[:workers]
        numbers = self._rows.reshape(-1)
        # Where each number of the worker stands whose numbers its part begins with.
        # The worker after that one is one row before: rows go backwards.
        places = first_places(size, self._rank, workers)
        total = numbers[workers * size :][places]
        for later in range(1, workers):
            total += numbers[(workers - later) * size :][places]
        return total

    def _met(self, ends: Sequence[End]) -> np.ndarray:
        workers, rows = self._workers, swap_rows(self._rows, ends, begun=True)
        total = rows[0].copy()
        # Row d is that of the worker d places before: the one after is the last row.
        for row in rows[:0:-1]:
            total += row
        rows[0] = total
        gather_rows(rows, ends)
        edges = part_edges(self._flat.size, workers)
        sums = np.empty_like(self._flat)
        for part in range(workers):
            start, stop = edges[part], edges[part + 1]
            sums[start:stop] = rows[(self._rank - part) % workers, : stop - start]
        return sums


@functools.lru_cache(maxsize=16)
def first_places(size: int, rank: int, workers: int) -> np.ndarray:
    """For each of `size` numbers its place in flat rows by distance, [workers, size]:
    in the row of the worker that its part begins with.

    >>> first_places(4, rank=1, workers=2)
    array([4, 5, 2, 3])
    """
    starts = part_edges(size, workers)[1:]
    parts = np.searchsorted(starts, np.arange(size), side="right")
    return (rank - parts) % workers * size + np.arange(size)
