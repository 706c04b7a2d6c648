"""Ring all-reduce over lists of arrays: arithmetic and order, no sockets.

Patarasuk and Yuan (2009): N members, N parts. In N - 1 rounds each member passes a part
on and adds its own to the one it receives (reduce-scatter); in N - 1 more rounds the
finished parts go round (all-gather). Each half sends n (N - 1) / N bytes per member,
the minimum.

Arrays are not concatenated: parts and blocks are ranges within them. A block is small
enough to stay in the cache from receipt to addition, and is passed on at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

BLOCK_BYTES = 1 << 18

Arrays = Sequence[np.ndarray]
Block = tuple[int, int, int]  # array, first element, end
Parts = Sequence[Sequence[Block]]  # by member
Send = Callable[[np.ndarray], None]
Receive = Callable[[np.ndarray], None]
Add = Callable[[np.ndarray, np.ndarray], None]


def add_up(received: np.ndarray, own: np.ndarray, total: np.ndarray) -> None:
    """Writes the sum of two arrays into `total`, which may be one of them."""
    # Loss scaling looks for infinities; a warning for each would bury other output.
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(received, own, out=total)


class Ends:
    """How a member exchanges blocks with its two ring neighbors.

    Args:
      send: sends an array to the next member; may return early, so the array must not
        change afterwards.
      receive: fills an array from the previous member.
      pass_on: sends a block of a result and may round it in place, so that all members
        keep the same bits; default `send`.
      add: fills its first argument with the received block plus its second argument.
      block_bytes: block size; members may use different ones.
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
    """Splits arrays evenly: the ranges (array, start, stop) of each part.

    >>> split_evenly([5, 3], parts=2)
    [[(0, 0, 4)], [(0, 4, 5), (1, 0, 3)]]
    """
    edges = part_edges(sum(sizes), parts)
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
    """Ranges by array and worker -> by worker, each with its array's index.

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
    """Cuts ranges into blocks of at most `block_bytes`, in order.

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
    inputs: Arrays, outputs: Arrays, rank: int, members: int, ends: Ends
) -> None:
    """Writes the sum of all members' `inputs` into `outputs`, of the same shapes.

    Both are flat contiguous arrays of one dtype; `inputs` stay unchanged. All members
    get the same bits: each part is added up once, along the ring.
    """
    ranges = split_evenly([array.size for array in inputs], members)
    parts = _blocks_by_part(inputs, ranges, ends)
    # A part is finished in the last round; passing it on starts the all-gather.
    _send(inputs, parts[rank], ends)
    _add_and_pass(inputs, outputs, parts, rank, members, ends)
    _pass_round(outputs, parts, rank, members - 1, ends.pass_on, ends)


def ring_reduce_scatter(
    inputs: Arrays, outputs: Arrays, ranges: Parts, rank: int, ends: Ends
) -> None:
    """Writes part `rank` of the sum of all members' `inputs` into `outputs`.

    `outputs` have the inputs' shapes; outside of part `rank` they hold partial sums.
    """
    parts = _blocks_by_part(inputs, ranges, ends)
    first, rounds = rank - 1, len(parts) - 1
    _send(inputs, parts[first], ends)
    _add_and_pass(inputs, outputs, parts, first, rounds, ends)


def ring_all_gather(
    arrays: Arrays, ranges: Parts, rank: int, ends: Ends, begun: bool = False
) -> None:
    """Fills `arrays` with all parts; `rank` is filled and, if `begun`, sent already."""
    parts = _blocks_by_part(arrays, ranges, ends)
    if not begun:
        _send(arrays, parts[rank], ends)
    _pass_round(arrays, parts, rank - 1, len(parts) - 1, ends.send, ends)


def _blocks_by_part(arrays: Arrays, ranges: Parts, ends: Ends) -> list[list[Block]]:
    element_bytes = arrays[0].dtype.itemsize
    return [blocks_of(part, element_bytes, ends.block_bytes) for part in ranges]


def _send(arrays: Arrays, blocks: Sequence[Block], ends: Ends) -> None:
    for array, start, stop in blocks:
        ends.send(arrays[array][start:stop])


def _add_and_pass(
    inputs: Arrays, outputs: Arrays, parts: Parts, first: int, rounds: int, ends: Ends
) -> None:
    """Adds own blocks to received parts, after part `first` was sent, and passes them
    on in rounds before `rounds`."""
    members = len(parts)
    for step in range(1, members):
        for array, start, stop in parts[(first - step) % members]:
            block = outputs[array][start:stop]
            ends.add(block, inputs[array][start:stop])
            if step < rounds:
                ends.pass_on(block)


def _pass_round(
    arrays: Arrays, parts: Parts, first: int, rounds: int, pass_on: Send, ends: Ends
) -> None:
    """Receives part `first` and those before it; passes on all but the last."""
    for step in range(rounds):
        for array, start, stop in parts[(first - step) % len(parts)]:
            block = arrays[array][start:stop]
            ends.receive(block)
            if step < rounds - 1:
                pass_on(block)


# Sums that travel in 16 bits: members add in the arrays' own type, send values rounded
# to nearest even, and keep what they sent, so that all end with the same bits. Values
# beyond float16's 65,504 become infinite, which loss scaling looks for.


def wire_type(name: str) -> np.dtype:
    """NumPy's dtype of that name; bfloat16 is from ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes  # a dependency of Keras

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def round_to(dtype: np.dtype, array: np.ndarray) -> np.ndarray:
    """A copy in the wire's type; overflows become infinities without a warning."""
    with np.errstate(over="ignore"):
        return array.astype(dtype)


def part_edges(elements: int, parts: int) -> list[int]:
    """The start of each of evenly split parts, and the end of the last part."""
    return [elements * part // parts for part in range(parts + 1)]


class RoundedWire:
    """Ring functions for blocks that travel as `dtype`; see `Ends`."""

    def __init__(self, dtype: np.dtype, send: Send, receive: Receive):
        self._dtype, self._send, self._receive = dtype, send, receive
        self._received = np.empty(BLOCK_BYTES // dtype.itemsize, dtype)

    def send(self, block: np.ndarray) -> None:
        self._send(round_to(self._dtype, block))

    def pass_on(self, block: np.ndarray) -> None:
        rounded = round_to(self._dtype, block)
        block[...] = rounded
        self._send(rounded)

    def receive(self, block: np.ndarray) -> None:
        received = self._received[: block.size]
        self._receive(received)
        block[...] = received
