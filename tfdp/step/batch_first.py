"""Makes a step wait for its batch, so that a step without one changes nothing.

For input of unknown length Keras detects the end by a step that fails for lack of a
batch. Ops that need none (counters, weight decay, seeds) may have run by then, on some
replicas, and their copies would diverge.
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
    """Within this, the yielded step waits for the batch of all replicas."""
    parts = [] if tf.executing_eagerly() else tensors_of_this_graph(arguments)
    if not parts:
        yield step
        return
    with tf.control_dependencies(parts):
        there = tf.no_op("batch_is_there")

    # Replicas are traced in threads, which do not inherit control dependencies.
    @library_code
    @functools.wraps(step)
    def step_after_batch(*args: Any, **kwargs: Any) -> Any:
        with tf.control_dependencies([there]):
            return step(*args, **kwargs)

    yield step_after_batch


def tensors_of_this_graph(arguments: Any) -> list[tf.Tensor]:
    """The graph's tensors among nested `arguments`, and their components."""
    graph = tf.compat.v1.get_default_graph()
    return [
        part
        for part in tf.nest.flatten(arguments, expand_composites=True)
        if isinstance(part, tf.Tensor)
        and not isinstance(part, tf.__internal__.EagerTensor)
        and part.graph is graph
    ]
