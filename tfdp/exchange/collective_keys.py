"""The numbers by which TensorFlow finds the partners of a collective."""

from __future__ import annotations

import hashlib

__all__ = ["CollectiveKeys"]

# TensorFlow takes an int32, and tfdp none that is negative.
KEYS = 2**31


class CollectiveKeys:
    """A number for each exchange of a group, the same on every host.

    Hosts may trace at different times, so the number follows from what the exchange
    is. Two of them may fall on one number (of 1000 some pair does in 1 of 4300 groups):
    then the later one takes the next that is free. Hosts trace the same program, so
    they meet such a pair in the same order.
    """

    def __init__(self) -> None:
        self._keys: dict[str, int] = {}
        self._taken: set[int] = set()

    def key_of(self, exchange: str) -> int:
        """The number of `exchange`, which no other one has."""
        if exchange not in self._keys:
            key = first_choice(exchange)
            while key in self._taken:
                key = (key + 1) % KEYS
            self._keys[exchange] = key
            self._taken.add(key)
        return self._keys[exchange]


def first_choice(exchange: str) -> int:
    """The number that it has unless another exchange has it already."""
    digest = hashlib.blake2b(exchange.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % KEYS
