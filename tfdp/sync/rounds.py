"""`Sync`: rounds of local updates, the base of `LocalSGD` and `DiLoCo`."""

from __future__ import annotations

from collections.abc import Sequence

from tfdp.errors import ConfigurationError
from tfdp.plan.options import ACROSS
from tfdp.sync.policy import Policy, check_whole


class Sync(Policy):
    """Rounds of updates that groups of replicas make independently.

    every       updates in a round, at least 1
    start_step  plain synchronous updates before the first round, at least 0
    across      which groups: "hosts", or all "replicas"
    """

    every: int
    start_step: int
    across: str

    def __post_init__(self) -> None:
        check_whole(self, "every", 1)
        check_whole(self, "start_step", 0)
        if self.across not in ACROSS:
            raise ConfigurationError(
                f"{type(self).__name__}.across must be 'hosts' (replicas of a host "
                "step together, hosts synchronize once per round) or 'replicas' (each "
                f"trains independently). Received: {self.across!r}."
            )

    @property
    def weighs_batches(self) -> bool:
        return self.start_step > 0

    def updates_lacking(self, updates: int) -> int:
        """How many, the last of `updates`, the outer weights lack.

        >>> from tfdp.sync import DiLoCo
        >>> [DiLoCo(every=10, start_step=3).updates_lacking(n) for n in (3, 4, 13, 14)]
        [0, 1, 0, 1]
        >>> [DiLoCo(10, overlap_steps=2).updates_lacking(n) for n in (1, 11, 12, 21)]
        [1, 11, 2, 11]
        """
        local = max(0, updates - self.start_step)
        overlap = getattr(self, "overlap_steps", 0)
        return min(local, (local - overlap) % self.every + overlap)


def fragments_of(sizes: Sequence[int], fragments: int) -> tuple[tuple[int, ...], ...]:
    """The variables of each fragment, of about equal bytes.

    Given the bytes of each variable, assigns the largest first, each to the fragment of
    the fewest bytes so far. Raises `ConfigurationError` if variables are too few.

    >>> fragments_of([40, 10, 30, 20], 2)
    ((0, 1), (2, 3))
    """
    if fragments > len(sizes):
        raise ConfigurationError(
            f"DiLoCo(fragments={fragments}) cannot part {len(sizes)} variables: a "
            "fragment holds one at least. Give fewer fragments."
        )
    parts: list[list[int]] = [[] for _ in range(fragments)]
    filled = [0] * fragments
    for place in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        least = min(range(fragments), key=lambda p: (filled[p], len(parts[p]), p))
        parts[least].append(place)
        filled[least] += sizes[place]
    return tuple(tuple(sorted(part)) for part in parts)


def synchronization_of(fragment: int, fragments: int, every: int) -> int:
    """The update of a round, modulo `every`, after which a fragment synchronizes.

    >>> [synchronization_of(p, 3, 30) for p in range(3)]
    [10, 20, 0]
    """
    return (fragment + 1) * (every // fragments) % every
