"""Checks sums before anything is timed. No TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdp.errors import CollectiveError

# Half the distance from 1 to the next float32: largest relative error of an addition.
FLOAT32_ROUNDING = 2.0**-24


def check_sum(
    arm: str,
    index: int,
    parts: Sequence[np.ndarray],
    on_replicas: Sequence[Any],
    coarseness: float = 0.0,
) -> None:
    """Raises CollectiveError if a gradient's sum is wrong on a replica of this process.

    N float32 numbers added in any order are off by at most N - 1 roundings of the sum
    of their magnitudes; twice that is allowed. `coarseness`: what compression may lose,
    relative to the largest number of a tensor.
    """
    parts = [part.astype(np.float64) for part in parts]
    expected = sum(parts)
    allowed = 2 * (len(parts) - 1) * FLOAT32_ROUNDING * sum(map(np.abs, parts))
    if coarseness:
        # Hosts send the sums of their replicas, whose largest number is at most this.
        allowed = allowed + coarseness * sum(np.abs(part).max() for part in parts)
    for rank, value in enumerate(on_replicas):
        error = np.abs(value.numpy() - expected)
        if not np.all(error <= allowed):
            raise CollectiveError(
                f"Arm {arm!r} is not timed: its sum of gradient {index} "
                f"(shape {tuple(value.shape)}) on replica {rank} is off by "
                f"{np.max(error):.3g}. At most {np.max(allowed):.3g} is rounding."
            )
