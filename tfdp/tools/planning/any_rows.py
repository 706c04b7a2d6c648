"""A step traced once and converted to any number of rows.

It is traced for a prime number of rows that divides no other length of the model, so a
tensor length that is a multiple of it is the batch; all others are independent of it.
TensorFlow builds a few ops differently for small tensors: zeros of fewer than 1,000
elements are a constant, which is not counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable

# Tracing allocates one batch of zeros of at most this size.
MOST_BATCH_BYTES = 2**28
# Small enough to make the batch quickly, large enough to avoid chance matches.
LEAST_ROWS, MOST_ROWS = 101, 1021
# Fractions of a batch that a model may take, give or take one row.
PARTS = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (3, 2), (2, 3))


class UnclearLength(ValueError):
    """A length is near a fraction of the rows but no multiple of them."""


class AnyRows:
    """Converts lengths traced for `traced` rows (a prime) to `wanted` rows.

    `fixed`: lengths that are independent of the batch.

    >>> rows = AnyRows(101, 8)
    >>> [rows.length(each) for each in (101, 768, 404, 101 * 101)]
    [8, 768, 32, 64]
    >>> rows.length(50)
    Traceback (most recent call last):
    tfdp.tools.planning.any_rows.UnclearLength: 50 is near a part of 101 rows
    """

    def __init__(self, traced: int, wanted: int, fixed: Collection[int] = ()):
        self._traced, self._wanted = traced, wanted
        self._doubtful = near_parts(traced) - set(fixed)

    def length(self, size: int) -> int:
        """`size` for the wanted rows; UnclearLength if that is ambiguous."""
        if size in self._doubtful:
            raise UnclearLength(f"{size} is near a part of {self._traced} rows")
        times = 1
        while size and size % self._traced == 0:
            size //= self._traced
            times *= self._wanted
        return size * times


def near_parts(rows: int) -> set[int]:
    """Lengths of halves, thirds and the like of `rows`, give or take one."""
    found = {
        rows * above // below + more
        for (above, below), more in itertools.product(PARTS, (-1, 0, 1))
    }
    return {size for size in found if size % rows}


def rows_to_trace(
    input_lengths: Iterable[int], other_lengths: Iterable[int], row_bytes: int
) -> int | None:
    """The number of rows to trace a step with; None: no suitable number.

    `row_bytes`: of one row of every traced replica. Layers may halve `input_lengths`.

    >>> rows_to_trace([64], [768, 10_000], 256)
    1021
    """
    own, others = set(input_lengths), set(other_lengths)
    lengths = own | others | {size >> times for size in own for times in range(1, 8)}
    most = min(MOST_ROWS, MOST_BATCH_BYTES // max(row_bytes, 1))
    for rows in range(most, LEAST_ROWS - 1, -1):
        is_prime = all(rows % divisor for divisor in range(2, int(rows**0.5) + 1))
        if not is_prime or any(size % rows == 0 for size in lengths if size):
            continue
        if not near_parts(rows) & lengths:
            return rows
    return None
