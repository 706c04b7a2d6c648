"""The order that TensorFlow gives to operations with side effects in a graph.

What touches one resource, and what has effects but touches none, runs in the order in
which it was built. TensorFlow adds the edges for it when a function has been traced.
"""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf
from tensorflow.python.framework.auto_control_deps import op_is_stateful
from tensorflow.python.framework.auto_control_deps_utils import (
    get_read_write_resource_inputs,
)

__all__ = [
    "has_effects",
    "is_ordered_here",
    "run_behind",
    "touched_by",
    "unordered",
]


def is_ordered_here() -> bool:
    """Whether TensorFlow will order effects of the graph that is being built."""
    graph = tf.compat.v1.get_default_graph()
    return getattr(graph, "experimental_acd_manager", None) is not None


def unordered() -> set[tf.Operation]:
    """The operations of the graph being built that TensorFlow will not order."""
    manager = tf.compat.v1.get_default_graph().experimental_acd_manager
    return set(manager._independent_ops)


def has_effects(op: tf.Operation) -> bool:
    """Whether TensorFlow orders `op` though it may touch no resource."""
    return bool(op_is_stateful(op))


def touched_by(op: tf.Operation) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """The handles of resources that `op` only reads, and that it may change."""
    reads, writes = get_read_write_resource_inputs(op)
    return list(reads), list(writes)


def run_behind(op: tf.Operation, before: Iterable[tf.Operation]) -> None:
    """Has `op` wait for all of `before`."""
    op._add_control_inputs(list(before))
