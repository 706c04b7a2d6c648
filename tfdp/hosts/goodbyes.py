"""Who left, in which order, and why."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from tfdp.hosts.messages import checked_text

__all__ = ["END_OF_SCRIPT", "Goodbyes"]

LONGEST_REASON_CHARACTERS = 1 << 20
END_OF_SCRIPT = "has come to the end of its script"
# The error that a worker left with, if any, and whether another worker caused it.
Goodbye = tuple[str | None, bool]


class Goodbyes:
    """The goodbyes that this worker has heard, or heard of, by rank."""

    def __init__(self) -> None:
        self._left: dict[int, Goodbye] = {}  # in the order in which they left

    def note(self, rank: int, goodbye: Any) -> None:
        """Notes that `rank` left; the first goodbye of a worker counts.

        Raises:
          ValueError, TypeError: when `goodbye` is not one that a worker sends.
        """
        error, is_consequence = goodbye
        if error is not None:
            checked_text(error, LONGEST_REASON_CHARACTERS)
        self._left.setdefault(rank, (error, bool(is_consequence)))

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._left))

    def __bool__(self) -> bool:
        return bool(self._left)

    def as_told(self) -> dict[int, Goodbye]:
        """For a message to the others."""
        return dict(self._left)

    def reason(self) -> str:
        """The goodbye that matters: others may have left because that one did."""
        left = list(self._left.items())
        rank, (error, _) = next((entry for entry in left if not entry[1][1]), left[0])
        if error is None:
            return f"worker {rank} {END_OF_SCRIPT}"
        return f"worker {rank} has raised {error}"

    def lack_word(self, heard_from: Collection[int]) -> bool:
        """Whether one of them left without its word, or with an error."""
        return any(
            error is not None or rank not in heard_from
            for rank, (error, _) in list(self._left.items())
        )
