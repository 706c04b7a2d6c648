"""Checksums of the batches that a host has read, until the hosts have compared them.

Input is read ahead: at the end of an epoch hosts may have read different numbers of
batches, and have trained on the same ones. So what is compared is bounded by what the
steps have taken, where that is known, and by what all hosts have read.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

__all__ = ["BatchRecord", "Told", "common_ends", "first_differences"]

# By iterator: the number of the first batch that is told, and the checksums from there.
Told = Mapping[int, tuple[int, list[str]]]


class BatchRecord:
    """Of one dataset on this host, by iterator. Threads of input pipelines write it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: dict[int, int] = {}
        self._checksums: dict[int, list[str]] = {}

    def note(self, iterator: int, checksum: str) -> None:
        """Keeps the checksum of the next batch of `iterator`."""
        with self._lock:
            self._first.setdefault(iterator, 0)
            self._checksums.setdefault(iterator, []).append(checksum)

    def told(self, taken: Sequence[int] | None) -> dict[int, tuple[int, list[str]]]:
        """What was not compared yet.

        Args:
          taken: how many batches steps have taken from each iterator; None: unknown,
            and what was read ahead is told as well.
        """
        with self._lock:
            told = {}
            for iterator, checksums in self._checksums.items():
                first, end = self._first[iterator], len(checksums)
                if taken is not None:
                    known = taken[iterator] if iterator < len(taken) else 0
                    end = min(max(known - first, 0), end)
                if end:
                    told[iterator] = (first, checksums[:end])
            return told

    def forget(self, ends: Mapping[int, int]) -> None:
        """Drops what was compared: of each iterator the batches before that number."""
        with self._lock:
            for iterator, end in ends.items():
                done = end - self._first[iterator]
                self._first[iterator] = end
                del self._checksums[iterator][:done]

    def keep(self, told: Told, ends: Mapping[int, int]) -> None:
        """Takes back what was forgotten, from those numbers on, as not compared yet.

        Args:
          told: what `told` gave, and was forgotten.
          ends: by iterator, up to which number it was compared; else not at all.
        """
        with self._lock:
            for iterator, (first, checksums) in told.items():
                start = max(ends.get(iterator, first), first)
                self._first[iterator] = start
                self._checksums[iterator][:0] = checksums[start - first :]


def first_differences(everybody: Sequence[Told]) -> dict[int, tuple[int, int]]:
    """By rank, where a host first read another batch than host 0: iterator and number.

    Args:
      everybody: what each host tells, by rank.
    """
    found = {}
    for rank, theirs in enumerate(everybody):
        for iterator in sorted(set(theirs) & set(everybody[0])):
            (first, own), (other_first, others) = (
                everybody[0][iterator],
                theirs[iterator],
            )
            start = max(first, other_first)
            pairs = zip(
                own[start - first :], others[start - other_first :], strict=False
            )
            number = next((n for n, (a, b) in enumerate(pairs, start) if a != b), None)
            if number is not None:
                found[rank] = (iterator, number)
                break
    return found


def common_ends(everybody: Sequence[Told]) -> dict[int, int]:
    """By iterator, up to which number all hosts have told their batches."""
    iterators = set.intersection(*map(set, everybody))
    return {
        iterator: min(
            first + len(told) for first, told in (t[iterator] for t in everybody)
        )
        for iterator in iterators
    }
