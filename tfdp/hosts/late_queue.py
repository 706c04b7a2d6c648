"""`LateQueue`: sums of gradients that no update has used yet, in the order of steps."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from tfdp.errors import CollectiveError
from tfdp.hosts.async_exchanges import AsyncSums

# By place: the sum, or None where the step had no such array.
Sums = dict[int, np.ndarray]

_owners = itertools.count()


class LateQueue:
    """The sums that one optimizer has begun and not taken.

    Args:
      sums: runs them between hosts; None: what `begin` gets is complete.
      steps: the most sums in flight between two steps, at least 1.
      takes_early: whether a step also takes a complete sum that is not due.
      most: the most sums that one step takes.
    """

    def __init__(
        self, sums: AsyncSums | None, *, steps: int, takes_early: bool, most: int
    ):
        self._sums, self._steps = sums, steps
        self._takes_early, self._most = takes_early, most
        self._owner, self._begun = next(_owners), 0
        #: Steps, by their number in this process, and the places of their arrays.
        self._in_flight: deque[tuple[int, tuple[int, ...]]] = deque()
        self._complete: dict[int, Sums] = {}
        self._taken: list[Sums] = []

    def __len__(self) -> int:
        return len(self._in_flight)

    def begin(self, places: Sequence[int], arrays: Sequence[np.ndarray]) -> None:
        """Begins the sums of the next step, of which `arrays` are this host's part."""
        step, self._begun = self._begun, self._begun + 1
        self._in_flight.append((step, tuple(places)))
        if self._sums is None:
            own = [np.array(array) for array in arrays]
            self._complete[step] = dict(zip(places, own, strict=True))
        else:
            label = f"gradients of update {step + 1}"
            self._sums.begin((self._owner, step), arrays, label)

    def take_due(self) -> int:
        """Takes what the step that has just begun its sum must, or may, apply; returns
        how many sums. Waits for those that it must."""
        self._taken = []
        while self._in_flight and len(self._taken) < self._most:
            must = len(self._in_flight) > self._steps
            if not must and not (self._takes_early and self._is_complete()):
                break
            self._take_oldest()
        if len(self._in_flight) > self._steps:
            raise CollectiveError(
                f"{len(self._in_flight)} updates of earlier steps are left at the end "
                f"of a step, and at most {self._steps} may be: a step before has "
                "failed. Make the model and its optimizer again, or restore a "
                "checkpoint."
            )
        return len(self._taken)

    def take_oldest(self) -> int:
        """Takes the oldest sum, if any, and waits for it; returns how many."""
        self._taken = []
        if self._in_flight:
            self._take_oldest()
        return len(self._taken)

    def taken(self, number: int) -> Sums:
        """One of the sums that were taken last."""
        return self._taken[number]

    def _is_complete(self) -> bool:
        step, _ = self._in_flight[0]
        known = step in self._complete or self._sums is None
        return known or self._sums.is_complete((self._owner, step))  # type: ignore

    def _take_oldest(self) -> None:
        self._taken.append(self._wait_for(0))
        step, _ = self._in_flight.popleft()
        self._complete.pop(step, None)

    def _wait_for(self, number: int) -> Sums:
        step, places = self._in_flight[number]
        if step not in self._complete and self._sums is not None:
            found = self._sums.take((self._owner, step)) or []
            self._complete[step] = dict(zip(places, found, strict=True))
        return self._complete[step]

    # A checkpoint holds, for each place, an array of `steps` rows.

    def rows(self, place: int, shape: Sequence[int], dtype: str) -> np.ndarray:
        """Waits for what is in flight; the oldest comes first."""
        rows = np.zeros([self._steps, *shape], dtype)
        for number in range(len(self._in_flight)):
            sums = self._wait_for(number)
            if place in sums:
                rows[number] = sums[place]
        return rows

    def restore(self, count: int, rows: Mapping[int, np.ndarray]) -> None:
        """Replaces what is in flight by what a checkpoint held; other hosts still get
        this host's part of the sums that it drops."""
        for step, _ in self._in_flight:
            if self._sums is not None:
                self._sums.forget((self._owner, step))
        self._in_flight.clear()
        self._complete.clear()
        for number in range(min(count, self._steps)):
            step, self._begun = self._begun, self._begun + 1
            self._in_flight.append((step, tuple(rows)))
            self._complete[step] = {place: rows[place][number] for place in rows}
