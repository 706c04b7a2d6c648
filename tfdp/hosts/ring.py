"""The ring all-reduce over lists of arrays: pure arithmetic and order, no sockets.

Patarasuk and Yuan (2009): N members, N parts. N - 1 times everyone passes a part on and
adds its own to the one that comes (reduce-scatter); then N - 1 times the finished parts
go round (all-gather). Each member sends 2 n (N - 1) / N bytes, the least possible.

The arrays are never joined into one: parts and blocks are ranges within them. Blocks
are small enough to stay in the cache between being received and being added, and a
block is passed on as soon as it is added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

__all__ = ["BLOCK_BYTES", "ring_sum", "split_into_blocks"]

BLOCK_BYTES = 1 << 18

Block = tuple[int, int, int]  # array, first element, end


def split_into_blocks(
    sizes: Sequence[int], element_bytes: int, parts: int, block_bytes: int = BLOCK_BYTES
) -> list[list[Block]]:
    """By part, the blocks (array, start, stop) of arrays with these element counts.

    >>> split_into_blocks([5, 3], element_bytes=4, parts=2, block_bytes=12)
    [[(0, 0, 3), (0, 3, 4)], [(0, 4, 5), (1, 0, 3)]]
    """
    total = sum(sizes)
    edges = [total * part // parts for part in range(parts + 1)]
    block_elements = max(block_bytes // element_bytes, 1)
    blocks: list[list[Block]] = [[] for _ in range(parts)]
    first = 0
    for array, size in enumerate(sizes):
        for part in range(parts):
            start = max(edges[part] - first, 0)
            stop = min(edges[part + 1] - first, size)
            for begin in range(start, stop, block_elements):
                end = min(begin + block_elements, stop)
                blocks[part].append((array, begin, end))
        first += size
    return blocks


def ring_sum(
    inputs: Sequence[np.ndarray],
    outputs: Sequence[np.ndarray],
    rank: int,
    members: int,
    send: Callable[[np.ndarray], None],
    receive: Callable[[np.ndarray], None],
    pass_on: Callable[[np.ndarray], None] | None = None,
) -> None:
    """Writes the sum of everybody's `inputs` into `outputs`.

    All members end with the same bits: each part is added up once, along the ring.

    Args:
      inputs: flat contiguous arrays of one dtype; not changed.
      outputs: the same shapes; not read before they are written.
      rank: this member's place.
      members: N, at least 2.
      send: passes an array to the next member; may return before it is sent, so the
        array must not change any more.
      receive: fills an array from the member before.
      pass_on: sends a block of `outputs`, and may round it: what the others get is
        then what this member keeps. `send` by default.
    """
    pass_on = pass_on or send
    parts = split_into_blocks(
        [array.size for array in inputs], inputs[0].dtype.itemsize, members
    )
    for array, start, stop in parts[rank]:
        send(inputs[array][start:stop])
    for step in range(1, members):
        for array, start, stop in parts[(rank - step) % members]:
            block = outputs[array][start:stop]
            receive(block)
            # Loss scaling looks for infinities; a warning for each would bury others.
            with np.errstate(over="ignore", invalid="ignore"):
                np.add(block, inputs[array][start:stop], out=block)
            # In the last round the block is finished, and this starts the all-gather.
            pass_on(block)
    for step in range(members - 1):
        for array, start, stop in parts[(rank - step) % members]:
            block = outputs[array][start:stop]
            receive(block)
            if step < members - 2:
                pass_on(block)
