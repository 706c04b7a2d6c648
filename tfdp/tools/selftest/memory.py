"""What a step takes of a GPU's memory, beside what `tfdp plan` says before."""

from __future__ import annotations

import functools
from collections.abc import Callable

import keras
import tensorflow as tf

from tfdp.planning import plan
from tfdp.strategies.data_parallel import DataParallelStrategy
from tfdp.strategies.in_words import unsaid
from tfdp.tools.selftest.networks import build_large, make_batch

__all__ = ["measure_memory"]

ROWS, STEPS = 256, 3


def measure_memory(strategy: DataParallelStrategy) -> str:
    """Reads the peak of some steps from TensorFlow's allocator.

    Args:
      strategy: of one replica, on a GPU.

    Returns:
      The peak, and the plan's.
    """
    build = functools.partial(build_large, "GPU")
    with unsaid():
        with strategy.scope():
            model = build()
        batch = make_batch(model, ROWS)
        # What is allocated once, as for the choice of kernels, does not count.
        model.fit(batch, steps_per_epoch=STEPS, verbose=0, shuffle=False)
        tf.config.experimental.reset_memory_stats("GPU:0")
        model.fit(batch, steps_per_epoch=STEPS, verbose=0, shuffle=False)
    peak = tf.config.experimental.get_memory_info("GPU:0")["peak"]
    return f"{peak / 1e6:.1f} MB at the most, planned {_planned(build)}"


def _planned(build: Callable[[], keras.Model]) -> str:
    try:
        return f"{plan(build, ROWS).peak_bytes / 1e6:.1f} MB"
    except Exception as error:  # what was measured is worth more than the plan
        return f"nothing ({type(error).__name__}: {error})"
