"""`Sync`: rounds of local updates, the base of all schedules."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfdp.checks import is_number, is_whole
from tfdp.errors import ConfigurationError
from tfdp.plan.communication import ACROSS


class Sync:
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

    def get_config(self) -> dict[str, Any]:
        """The fields and the name of the class, ready for JSON."""
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
        }
        if values.get("compression") is not None:
            values["compression"] = values["compression"].get_config()
        return {"method": type(self).__name__, **values}


def check_whole(sync: Sync, name: str, least: int) -> None:
    """Requires an integer of at least `least`."""
    value = getattr(sync, name)
    if not is_whole(value, least=least):
        raise ConfigurationError(
            f"{type(sync).__name__}.{name} must be an integer of at least {least}. "
            f"Received: {value!r}."
        )


def check_fraction(sync: Sync, name: str, *, below_one: bool) -> None:
    """Requires a finite number of at least 0, with `below_one` below 1."""
    value = getattr(sync, name)
    most = 1.0 if below_one else float("inf")
    if not is_number(value) or not 0.0 <= value < most:
        rule = "from 0 to below 1" if below_one else "of at least 0, and finite"
        raise ConfigurationError(
            f"{type(sync).__name__}.{name} must be a number {rule}. "
            f"Received: {value!r}."
        )
    object.__setattr__(sync, name, float(value))  # JSON has no NumPy numbers


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
