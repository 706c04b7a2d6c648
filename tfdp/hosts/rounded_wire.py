"""Sums whose parts travel between hosts in 16 bits.

Every host adds in the arrays' own type. What it sends is rounded to the wire's type,
to the nearest number, ties to even; and of its part of the result it keeps what it
sent, so that all hosts end with the same bits. A number beyond the largest float16
(65,504) becomes infinite, as it should: loss scaling looks for that.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tfdp.hosts.ring import BLOCK_BYTES

__all__ = ["RoundedWire", "part_edges", "round_to", "wire_type"]


def wire_type(name: str) -> np.dtype:
    """NumPy's type of that name; bfloat16 is one that ml_dtypes brings.

    >>> wire_type("bfloat16").itemsize
    2
    """
    if name == "bfloat16":
        import ml_dtypes  # a dependency of Keras

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def round_to(dtype: np.dtype, array: np.ndarray) -> np.ndarray:
    """A copy of `array` in the wire's type; an overflow is an infinity, silently."""
    with np.errstate(over="ignore"):
        return array.astype(dtype)


def part_edges(elements: int, parts: int) -> list[int]:
    """Where the parts of so many elements begin, and where the last one ends.

    >>> part_edges(5, 2)
    [0, 2, 5]
    """
    return [elements * part // parts for part in range(parts + 1)]


class RoundedWire:
    """Both ends of a ring, for blocks that travel as `dtype`.

    Args:
      dtype: the wire's type.
      send, receive: of the ring; see `ring_sum`.
    """

    def __init__(
        self,
        dtype: np.dtype,
        send: Callable[[np.ndarray], None],
        receive: Callable[[np.ndarray], None],
    ):
        self._dtype = dtype
        self._send = send
        self._receive = receive
        self._received = np.empty(BLOCK_BYTES // dtype.itemsize, dtype)

    def send(self, block: np.ndarray) -> None:
        """Sends `block`, which stays as it is."""
        self._send(round_to(self._dtype, block))

    def pass_on(self, block: np.ndarray) -> None:
        """Sends `block`, and rounds it where it lies to what was sent."""
        rounded = round_to(self._dtype, block)
        block[...] = rounded
        self._send(rounded)

    def receive(self, block: np.ndarray) -> None:
        """Fills `block`."""
        received = self._received[: block.size]
        self._receive(received)
        block[...] = received
