"""The seed that hosts agree on where the program has set none.

Without a global seed TensorFlow orders `shuffle(seed=7)` by that 7 alone, and draws a
seed for `shuffle()`. Hosts need one draw for all of them, so the strategy sets a global
seed. That one goes into every other order as well, and differs from job to job: readers
that promise an order by their own seed leave it out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tfdp._private import names

__all__ = ["agree_on_seed", "program_seed", "seed_to_share", "seeds_of_program"]

# What `agree_on_seed` has set; None: nothing.
_agreed: int | None = None


def program_seed() -> int | None:
    """What the program gave `tf.random.set_seed`, 0 included; None: nothing."""
    seed = names.global_seed()
    return None if seed == _agreed else seed


def seed_to_share() -> np.ndarray:
    """Whether the program has set a seed, and that seed or a drawn one: int64 [2]."""
    seed = program_seed()
    if seed is None:
        drawn = np.random.default_rng().integers(2**31)
        return np.array([0, drawn if _agreed is None else _agreed])
    return np.array([1, seed])


def agree_on_seed(shared: np.ndarray) -> None:
    """Sets what the first host shares, on a host whose program has set none.

    Args:
      shared: the first host's `seed_to_share`.
    """
    global _agreed
    if program_seed() is not None:
        return
    is_programs, seed = map(int, shared)
    if names.global_seed() != seed:
        # It begins all draws anew: not for a second strategy.
        tf.random.set_seed(seed)
    # The first host's program has set it, so it counts as set here as well.
    _agreed = None if is_programs else seed


@contextlib.contextmanager
def seeds_of_program() -> Iterator[None]:
    """While it is open, TensorFlow has the global seed of the program, or none.

    Only for what has a seed of its own: whatever else is made meanwhile, by other
    threads too, would draw on each host for itself.
    """
    seed = names.global_seed()
    if seed is None or seed != _agreed:
        yield
        return
    names.put_global_seed(None)
    try:
        yield
    finally:
        names.put_global_seed(seed)
