"""A step begins when its batch is there: one that gets none changes nothing.

Where input does not tell its length, Keras finds its end by a step that fails for want
of a batch. TensorFlow starts an operation as soon as its own inputs are there, and some
need nothing of a batch: counters, weight decay, seeds, the number of batches that a
report is a mean over. Whether such a one was faster than the end differs from replica
to replica, and their copies would differ from then on.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdp._private.functions import library_code


@contextlib.contextmanager
def batch_first(step: Callable, arguments: Any) -> Iterator[Callable]:
    """While this lasts, what replicas run waits for the batch of all of them.

    Args:
      step: what every replica runs.
      arguments: nested per-replica values that it is given.

    Yields:
      `step`, to be run in its place.
    """
    parts = [] if tf.executing_eagerly() else tensors_of_this_graph(arguments)
    if not parts:
        yield step
        return
    with tf.control_dependencies(parts):
        there = tf.no_op("batch_is_there")

    # Replicas are traced in threads, which have dependencies of their own.
    @library_code
    @functools.wraps(step)
    def step_after_batch(*args: Any, **kwargs: Any) -> Any:
        with tf.control_dependencies([there]):
            return step(*args, **kwargs)

    yield step_after_batch


def tensors_of_this_graph(arguments: Any) -> list[tf.Tensor]:
    """Those among nested `arguments`, and among what they are made of."""
    graph = tf.compat.v1.get_default_graph()
    return [
        part
        for part in tf.nest.flatten(arguments, expand_composites=True)
        if isinstance(part, tf.Tensor)
        and not isinstance(part, tf.__internal__.EagerTensor)
        and part.graph is graph
    ]
