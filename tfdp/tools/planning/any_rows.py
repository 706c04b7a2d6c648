"""A step traced once and read for any number of rows.

A step is traced for a prime number of rows that divides no other length of the model.
Whatever length of its tensors is a multiple of it is the batch, as often as it divides;
all others have nothing to do with it. TensorFlow builds a few ops otherwise for small
tensors: zeros of fewer than 1,000 numbers are a constant, which is not counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable

# A batch is made, of zeros, to trace a step.
MOST_BATCH_BYTES = 2**28
# Between these: so few that batches are made soon, so many that no length is met by
# chance.
LEAST_ROWS, MOST_ROWS = 101, 1021
# Parts of a batch that a model may take: to these of it, and one row more or less.
PARTS = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (3, 2), (2, 3))


class NotOfRows(ValueError):
    """The step has lengths that are near a part of its rows and no multiple of them."""


class AnyRows:
    """Lengths of a step that was traced for `traced` rows, for other rows.

    Args:
      traced: a prime number.
      wanted: rows; at least 1.
      fixed: lengths that are known to be no part of a batch.

    >>> rows = AnyRows(101, 8)
    >>> [rows.length(each) for each in (101, 768, 404, 101 * 101)]
    [8, 768, 32, 64]
    >>> rows.length(50)
    Traceback (most recent call last):
    tfdp.tools.planning.any_rows.NotOfRows: 50 is near a part of 101 rows
    """

    def __init__(self, traced: int, wanted: int, fixed: Collection[int] = ()):
        self._traced, self._wanted = traced, wanted
        self._doubtful = near_parts(traced) - set(fixed)

    def length(self, size: int) -> int:
        """For the wanted rows.

        Raises:
          NotOfRows: it may depend on the rows in another way.
        """
        if size in self._doubtful:
            raise NotOfRows(f"{size} is near a part of {self._traced} rows")
        times = 1
        while size and size % self._traced == 0:
            size //= self._traced
            times *= self._wanted
        return size * times


def near_parts(rows: int) -> set[int]:
    """Lengths that halves, thirds and the like of so many rows have, or one more."""
    found = {
        rows * above // below + more
        for (above, below), more in itertools.product(PARTS, (-1, 0, 1))
    }
    return {size for size in found if size % rows}


def rows_to_trace(
    input_lengths: Iterable[int], other_lengths: Iterable[int], row_bytes: int
) -> int | None:
    """For how many rows a step is traced; None: there is no such number.

    Args:
      input_lengths: of one row of the batch, such as the sides of images, of which
        layers may make halves.
      other_lengths: of the weights.
      row_bytes: of the rows of all replicas that are traced.

    >>> rows_to_trace([64], [768, 10_000], 256)
    1021
    >>> rows_to_trace([224, 224, 3], [64, 1000], 602_112) is None
    False
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
