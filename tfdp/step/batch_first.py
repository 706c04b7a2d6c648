"""Makes a step wait for its batch, so that a step without one changes nothing.

For input of unknown length Keras detects the end by a step that fails for lack of a
batch. Ops that need none (counters, weight decay, seeds) may have run by then, on some
replicas, and their copies would diverge.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp.lint.registry import is_of_graph


def when_batch_is_there(arguments: Any) -> list[tf.Operation]:
    """An operation that runs when the replicas' batches are there; none, if they are no
    tensors of the graph being built."""
    parts = tensors_of_this_graph(arguments)
    if not parts:
        return []
    with tf.control_dependencies(parts):
        return [tf.no_op("batch_is_there")]


def tensors_of_this_graph(arguments: Any) -> list[tf.Tensor]:
    """The graph's tensors among nested `arguments`, and their components."""
    graph = tf.compat.v1.get_default_graph()
    return [
        part
        for part in tf.nest.flatten(arguments, expand_composites=True)
        if is_of_graph(part) and part.graph is graph
    ]
