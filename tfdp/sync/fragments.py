"""Which weights meet together, where not all do at once."""

from __future__ import annotations

from collections.abc import Sequence

from tfdp.errors import ConfigurationError

__all__ = ["fragments_of", "meeting_of"]


def fragments_of(sizes: Sequence[int], fragments: int) -> tuple[tuple[int, ...], ...]:
    """The variables of each fragment, as even in bytes as whole variables can be.

    The largest first, each to the fragment that has least so far.

    Args:
      sizes: bytes of each variable.
      fragments: how many fragments, at least 1.

    Raises:
      ConfigurationError: when there are fewer variables than fragments.

    >>> fragments_of([40, 10, 30, 20], 2)
    ((0, 1), (2, 3))
    """
    if fragments > len(sizes):
        raise ConfigurationError(
            f"DiLoCo(fragments={fragments}) cannot part {len(sizes)} variables: a "
            "fragment holds one at least. Ask for fewer fragments."
        )
    parts: list[list[int]] = [[] for _ in range(fragments)]
    filled = [0] * fragments
    for place in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        least = min(range(fragments), key=lambda p: (filled[p], len(parts[p]), p))
        parts[least].append(place)
        filled[least] += sizes[place]
    return tuple(tuple(sorted(part)) for part in parts)


def meeting_of(fragment: int, fragments: int, every: int) -> int:
    """After which update of a round a fragment meets, modulo `every`.

    >>> [meeting_of(p, 3, 30) for p in range(3)]
    [10, 20, 0]
    """
    return (fragment + 1) * (every // fragments) % every
