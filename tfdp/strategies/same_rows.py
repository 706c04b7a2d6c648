"""Says that every replica trains on the same rows: nobody has distributed the dataset.

Keras distributes what `fit` is given; a loop of one's own has to do it.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.errors import SameRowsWarning
from tfdp.tracing.run import ReplicaRun

__all__ = ["warn_of_same_rows"]

_warned: weakref.WeakSet[Any] = weakref.WeakSet()


def warn_of_same_rows(strategy: Any, arguments: Any, run: ReplicaRun) -> None:
    """Warns, once for a strategy, where an optimizer has trained on shared rows.

    Without an optimizer at work the same rows are no mistake: they build a model, or
    are a table.

    Args:
      strategy: of the run.
      arguments: what `strategy.run` was called with.
      run: after the replicas have run.
    """
    # `updates` has an entry for each replica on which an optimizer was at work.
    if run.replicas == 1 or not run.updates or strategy in _warned:
        return
    values = tf.nest.flatten(arguments)
    if any(isinstance(value, tf.distribute.DistributedValues) for value in values):
        return
    shape = next((value.shape for value in values if _has_rows(value)), None)
    if shape is None:
        return
    _warned.add(strategy)
    warnings.warn(
        f"strategy.run gave all {run.replicas} replicas the same tensor of shape "
        f"{tuple(shape)}, and an optimizer trains on it: each replica trains on every "
        f"row, so all rows are computed {run.replicas} times. Loop over "
        "strategy.experimental_distribute_dataset(dataset), which gives each replica "
        "its part of a batch. If the tensor is no batch (a table, say), let the "
        "function use it without passing it as an argument.",
        SameRowsWarning,
        stacklevel=4,
    )


def _has_rows(value: Any) -> bool:
    is_tensor = tf.is_tensor(value) and not isinstance(value, tf.Variable)
    return (is_tensor or isinstance(value, np.ndarray)) and value.shape not in ((), [])
