"""The ring exchanges over lists of arrays: pure arithmetic and order, no sockets.

Patarasuk and Yuan (2009): N members, N parts. N - 1 times everyone passes a part on and
adds its own to the one that comes (reduce-scatter); then N - 1 times the finished parts
go round (all-gather). Each member sends n (N - 1) / N bytes in either half, the least
possible.

The arrays are never joined into one: parts and blocks are ranges within them. Blocks
are small enough to stay in the cache between being received and being added, and a
block is passed on as soon as it is added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

BLOCK_BYTES = 1 << 18

Block = tuple[int, int, int]  # array, first element, end
Send = Callable[[np.ndarray], None]
Receive = Callable[[np.ndarray], None]
Add = Callable[[np.ndarray, np.ndarray], None]


def add_up(came: np.ndarray, own: np.ndarray, total: np.ndarray) -> None:
    """Writes the sum of two arrays into `total`, which may be one of them."""
    # Loss scaling looks for infinities; a warning for each would bury others.
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(came, own, out=total)


class Ends:
    """What a member exchanges blocks by, with those before and after it.

    Args:
      send: passes an array to the next member; may return before it is sent, so the
        array must not change any more.
      receive: fills an array from the member before.
      pass_on: sends a block of a result, and may round it: what the others get is
        then what this member keeps. `send` by default.
      add: fills its first argument with the sum of what comes and its second one;
        `receive` and an addition by default.
      block_bytes: what is passed on at a time, BLOCK_BYTES by default; the others may
        have other blocks.
    """

    def __init__(
        self,
        send: Send,
        receive: Receive,
        pass_on: Send | None = None,
        add: Add | None = None,
        block_bytes: int | None = None,
    ):
        self.block_bytes = block_bytes or BLOCK_BYTES
        self.send, self.receive = send, receive
        self.pass_on = pass_on or send
        self.add = add or self._receive_and_add

    def _receive_and_add(self, block: np.ndarray, own: np.ndarray) -> None:
        self.receive(block)
        add_up(block, own, block)


def split_evenly(sizes: Sequence[int], parts: int) -> list[list[Block]]:
    """By part, the ranges (array, start, stop) of arrays with these element counts.

    >>> split_evenly([5, 3], parts=2)
    [[(0, 0, 4)], [(0, 4, 5), (1, 0, 3)]]
    """
    total = sum(sizes)
    edges = [total * part // parts for part in range(parts + 1)]
    ranges: list[list[Block]] = [[] for _ in range(parts)]
    first = 0
    for array, size in enumerate(sizes):
        for part in range(parts):
            start = max(edges[part] - first, 0)
            stop = min(edges[part + 1] - first, size)
            if start < stop:
                ranges[part].append((array, start, stop))
        first += size
    return ranges


def by_worker(ranges: Sequence[Sequence[tuple[int, int]]]) -> list[list[Block]]:
    """The ranges of each array by worker as each worker's, with the array's number.

    >>> by_worker([[(0, 2), (2, 4)], [(0, 1), (1, 3)]])
    [[(0, 0, 2), (1, 0, 1)], [(0, 2, 4), (1, 1, 3)]]
    """
    return [
        [(array, start, stop) for array, (start, stop) in enumerate(of_worker)]
        for of_worker in zip(*ranges, strict=True)
    ]


def blocks_of(
    ranges: Sequence[Block], element_bytes: int, block_bytes: int
) -> list[Block]:
    """The ranges cut into blocks of at most `block_bytes`, in their order.

    >>> blocks_of([(0, 0, 4), (1, 2, 3)], element_bytes=4, block_bytes=12)
    [(0, 0, 3), (0, 3, 4), (1, 2, 3)]
    """
    step = max(block_bytes // element_bytes, 1)
    return [
        (array, begin, min(begin + step, stop))
        for array, start, stop in ranges
        for begin in range(start, stop, step)
    ]


def ring_sum(
    inputs: Sequence[np.ndarray],
    outputs: Sequence[np.ndarray],
    rank: int,
    members: int,
    ends: Ends,
) -> None:
    """Writes the sum of everybody's `inputs` into `outputs`.

    All members end with the same bits: each part is added up once, along the ring.

    Args:
      inputs: flat contiguous arrays of one dtype; not changed.
      outputs: the same shapes; not read before they are written.
      rank: this member's place.
      members: N, at least 2.
      ends: what it exchanges blocks by.
    """
    ranges = split_evenly([array.size for array in inputs], members)
    parts = _blocks_by_part(inputs, ranges, ends)
    # In the last round a part is finished, and passing it on starts the all-gather.
    _send(inputs, parts[rank], ends)
    _add_and_pass(inputs, outputs, parts, rank, members, ends)
    _pass_round(outputs, parts, rank, members - 1, ends.pass_on, ends)


def ring_reduce_scatter(
    inputs: Sequence[np.ndarray],
    outputs: Sequence[np.ndarray],
    ranges: Sequence[Sequence[Block]],
    rank: int,
    ends: Ends,
) -> None:
    """Writes part `rank` of the sum of everybody's `inputs` into `outputs`.

    Args:
      inputs, rank, ends: see `ring_sum`.
      outputs: the same shapes; outside of this member's part they hold partial sums.
      ranges: by member, the part that it gets.
    """
    parts = _blocks_by_part(inputs, ranges, ends)
    first, rounds = rank - 1, len(parts) - 1
    _send(inputs, parts[first], ends)
    _add_and_pass(inputs, outputs, parts, first, rounds, ends)


def ring_all_gather(
    arrays: Sequence[np.ndarray],
    ranges: Sequence[Sequence[Block]],
    rank: int,
    ends: Ends,
    begun: bool = False,
) -> None:
    """Fills `arrays`, of which each member brings its part.

    Args:
      arrays: flat contiguous arrays of one dtype; part `rank` of them is filled.
      ranges: by member, the part that it brings.
      rank, ends: see `ring_sum`.
      begun: whether this member's part has been sent already.
    """
    parts = _blocks_by_part(arrays, ranges, ends)
    if not begun:
        _send(arrays, parts[rank], ends)
    _pass_round(arrays, parts, rank - 1, len(parts) - 1, ends.send, ends)


def _blocks_by_part(
    arrays: Sequence[np.ndarray], ranges: Sequence[Sequence[Block]], ends: Ends
) -> list[list[Block]]:
    element_bytes = arrays[0].dtype.itemsize
    return [blocks_of(part, element_bytes, ends.block_bytes) for part in ranges]


def _send(arrays: Sequence[np.ndarray], blocks: Sequence[Block], ends: Ends) -> None:
    for array, start, stop in blocks:
        ends.send(arrays[array][start:stop])


def _add_and_pass(
    inputs: Sequence[np.ndarray],
    outputs: Sequence[np.ndarray],
    parts: Sequence[Sequence[Block]],
    first: int,
    rounds: int,
    ends: Ends,
) -> None:
    """After part `first` was sent: adds to each part that comes, and passes it on
    before round `rounds`."""
    members = len(parts)
    for step in range(1, members):
        for array, start, stop in parts[(first - step) % members]:
            block = outputs[array][start:stop]
            ends.add(block, inputs[array][start:stop])
            if step < rounds:
                ends.pass_on(block)


def _pass_round(
    arrays: Sequence[np.ndarray],
    parts: Sequence[Sequence[Block]],
    first: int,
    rounds: int,
    pass_on: Send,
    ends: Ends,
) -> None:
    """Takes in part `first` and those before it; passes all but the last one on."""
    for step in range(rounds):
        for array, start, stop in parts[(first - step) % len(parts)]:
            block = arrays[array][start:stop]
            ends.receive(block)
            if step < rounds - 1:
                pass_on(block)


# Sums whose parts travel between hosts in 16 bits.
#
# Every host adds in the arrays' own type. What it sends is rounded to the wire's type,
# to the nearest number, ties to even; and of its part of the result it keeps what it
# sent, so that all hosts end with the same bits. A number beyond the largest float16
# (65,504) becomes infinite, as it should: loss scaling looks for that.


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
